"""One at a time for each file: threads, objects, processes; and a lock dies with its process, whoever was forked."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from sgpu.data.processes import single_flight
from sgpu.data.processes.single_flight import SingleFlight
from tests.data.conftest import eventually


@pytest.fixture
def file(tmp_path: pathlib.Path) -> str:
    return str(tmp_path / "flights")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_flight, "_WAIT_SECONDS", 0.0)


def is_free(flights: SingleFlight, path: str) -> bool:
    """With no patience."""
    taken = flights.take(path)
    flights.free(taken)
    return taken >= 0


def test_a_path_is_one_s_until_it_is_freed(file: str, impatient: None) -> None:
    ours, theirs = SingleFlight(file), SingleFlight(file)
    taken = ours.take("a")
    assert not is_free(ours, "a"), "another thread of the same object"
    assert not is_free(theirs, "a"), "another object, as in another process"
    assert is_free(ours, "b")
    assert is_free(theirs, "b")
    ours.free(taken)
    assert is_free(theirs, "a")
    with pytest.raises(KeyError), theirs.only_one("a"):
        raise KeyError
    assert is_free(ours, "a")


def test_threads_take_turns(file: str) -> None:
    flights, inside, most = [SingleFlight(file) for _ in range(2)], 0, 0

    def work(mine: SingleFlight) -> None:
        nonlocal inside, most
        for _ in range(20):
            with mine.only_one("a"):
                inside += 1
                most = max(most, inside)
                os.sched_yield()
                inside -= 1

    threads = [threading.Thread(target=work, args=(mine,)) for mine in flights * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_a_killed_process_frees_its_own_though_its_fork_lives(file: str, impatient: None) -> None:
    text = f"""
import os, sys, time
from sgpu.data.processes.single_flight import SingleFlight
flights = SingleFlight({file!r})
flights.take("a")
if os.fork() == 0:
    print(os.getpid(), flights.take("b") >= 0, flush=True)
    sys.stdin.read()
    os._exit(0)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        fork, took = parent.stdout.readline().split()
        assert took == "True"
        flights = SingleFlight(file)
        assert not is_free(flights, "a")
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        os.kill(int(fork), 0)
        assert is_free(flights, "a")
        assert not is_free(flights, "b")
    eventually(lambda: is_free(flights, "b"))


@pytest.mark.usefixtures("impatient")
def test_where_the_disk_knows_no_locks_all_go_ahead(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(single_flight.fcntl, "fcntl", refuse)
    ours, theirs = SingleFlight(file), SingleFlight(file)
    taken = ours.take("a")
    assert is_free(theirs, "a")
    assert not is_free(ours, "a"), "threads know of each other all the same"
    ours.free(taken)
    nowhere = SingleFlight(f"{file}/no/such/folder")
    assert is_free(nowhere, "a")
