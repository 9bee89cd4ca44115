"""What the kernel tells of processes that stand in ways of their own."""

from __future__ import annotations

import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from sgpu.agent.judging import kernel_view
from sgpu.agent.judging.kernel_view import KernelView, look, parse
from sgpu.agent.judging.stacks import Evidence


@pytest.fixture
def child() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts an interpreter that says `ready`, then does what the text says."""
    started: list[subprocess.Popen[bytes]] = []

    def start(text: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", f"print('ready', flush=True)\n{text}"]
        one = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(one)
        assert one.stdout is not None
        assert one.stdout.readline() == b"ready\n"
        return one

    yield start
    for one in started:
        one.kill()
        one.wait()
        for stream in (one.stdin, one.stdout):
            if stream is not None:
                stream.close()


def _until(pid: int, state: str) -> str:
    """Looks until it stands like that; that look."""
    deadline = time.monotonic() + 30
    while True:
        seen = look(pid)
        assert seen is not None
        view = parse(seen)
        if view is not None and view.state == state:
            return seen
        assert time.monotonic() < deadline, seen
        time.sleep(0.01)


def test_a_sleeping_one(child: Callable[[str], subprocess.Popen[bytes]]) -> None:
    one = child("import time; time.sleep(1000)")
    view = parse(_until(one.pid, "S"))
    assert view is not None
    assert "nanosleep" in view.place or not pathlib.Path(f"/proc/{one.pid}/wchan").read_text().strip("0")
    assert view.busy_share is None, "one look tells no share"


def test_a_stopped_one(child: Callable[[str], subprocess.Popen[bytes]]) -> None:
    one = child("import time; time.sleep(1000)")
    one.send_signal(signal.SIGSTOP)
    assert "state: T (stopped by a signal)" in _until(one.pid, "T")
    one.send_signal(signal.SIGCONT)
    _until(one.pid, "S")


def test_a_busy_one_and_an_idle_one(child: Callable[[str], subprocess.Popen[bytes]]) -> None:
    busy, idle = child("while True: pass"), child("import time; time.sleep(1000)")
    _until(idle.pid, "S")
    first = look(busy.pid), look(idle.pid)
    deadline = time.monotonic() + 60
    while True:  # until the busy one has had a core for long enough to be told from an idle one
        views = [parse(f"{before}{look(pid)}") for before, pid in zip(first, (busy.pid, idle.pid), strict=True)]
        assert all(view is not None for view in views)
        shares = [view.busy_share or 0.0 for view in views if view is not None]
        if views[0] is not None and views[0].state == "R" and shares[0] > 0.01:
            break
        assert time.monotonic() < deadline, views
    assert shares[1] < shares[0] / 2
    assert views[1] is not None
    assert views[1].state == "S"


@pytest.mark.parametrize(
    ("call", "held"), [("ctypes.PyDLL(None).usleep(10**9)", True), ("ctypes.CDLL(None).usleep(10**9)", False)]
)
def test_a_thread_that_waits_for_the_lock_of_the_interpreter_is_told_from_one_that_heard(
    child: Callable[[str], subprocess.Popen[bytes]], call: str, held: bool
) -> None:
    one = child(f"""
import ctypes, os, threading
from sgpu.contract.process import LISTENER, name_this_thread
def listen():
    name_this_thread(LISTENER)
    print("listens", flush=True)
    listens.set()
    while os.read(0, 1):
        os.write(1, b"heard")
listens = threading.Event()
threading.Thread(target=listen, daemon=True).start()
listens.wait()
{call}
""")
    assert one.stdout is not None
    assert one.stdin is not None
    assert one.stdout.readline() == b"listens\n"
    heard, view, deadline = not held, None, time.monotonic() + 60
    while heard != (not held) or view is None:  # the first word may come before the call has begun
        first, heard = look(one.pid), False
        one.stdin.write(b"x")
        one.stdin.flush()
        while not heard and (view is None or (view.turns or 0) < 20):
            heard = bool(select.select([one.stdout], [], [], 0.01)[0]) and os.read(one.stdout.fileno(), 5) == b"heard"
            view = parse(f"{first}{look(one.pid)}")
            assert time.monotonic() < deadline, view
    assert view.turns is not None
    assert (view.turns >= 20) is held
    assert Evidence(stack="x", kernel=view, answered=heard).holds_lock is held


def test_one_that_is_gone(child: Callable[[str], subprocess.Popen[bytes]], tmp_path: pathlib.Path) -> None:
    one = child("")
    one.wait(30)
    assert look(one.pid) is None
    assert kernel_view.examine(one.pid, tmp_path / "process") is None
    assert not (tmp_path / "process").exists()


@pytest.mark.parametrize(
    ("text", "view"),
    [
        ("", None),
        ("time: 1.0\nnothing else\n", None),
        ("time: 1.0\nstate: D (x)\ncpu_seconds: 2.00\nplace: nfs_wait\n", KernelView(state="D", place="nfs_wait")),
        ("time: 1.0\nstate: S (x)\ncpu_seconds: 2.00\nplace: a\nin the kernel:\n[<0>] a+0x1\n"
         "time: 1.5\nstate: R (x)\ncpu_seconds: 2.25\nplace: \n",
         KernelView(state="R", busy_share=0.5, cpu_seconds=0.25)),
        ("time: 1.0\nstate: S (x)\ncpu_seconds: 2.00\nturns_of_listener: 5\nturns_of_main: 7\nrunning_threads: 0\n"
         "time: 1.5\nstate: S (x)\ncpu_seconds: 2.00\nturns_of_listener: 30\nturns_of_main: 8\nrunning_threads: 2\n",
         KernelView(state="S", busy_share=0.0, runs=True, turns=25, main_turns=1)),
    ],
)  # fmt: skip
def test_parse(text: str, view: KernelView | None) -> None:
    assert parse(text) == view


def test_py_spy_is_asked_for_the_stack_of_one_that_cannot_write_it(
    child: Callable[[str], subprocess.Popen[bytes]], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of that name stands in for it."""
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "asked: $*"\n')
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    into, one = tmp_path / "process", child("import time; time.sleep(1000)")
    _until(one.pid, "S")
    assert kernel_view.examine(one.pid, into) is None, "this one can"
    into.unlink()
    os.kill(one.pid, signal.SIGSTOP)
    _until(one.pid, "T")
    asked = kernel_view.examine(one.pid, into)
    assert asked is not None
    assert asked.wait(30) == 0
    assert kernel_view.examine(one.pid, into) is None, "once"
    text = into.read_text()
    assert f"asked: dump --nonblocking --pid {one.pid}" in text
    assert parse(text) is not None
    assert text.count("state: T") == 2
