"""The process that writes metrics is kept alive, and nothing waits for it for ever. A shell script stands in for it."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable

import pytest

from sgpu.agent.forwarder import Forwarder
from sgpu.contract import records
from sgpu.contract.forwarding import NO_MLFLOW
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import Status


@pytest.fixture
def run(tmp_path: pathlib.Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    Status(state="RUNNING", updated=5.0).write(run)
    return run


def _forwarder(run: RunDir, script: str) -> Forwarder:
    """`script` is run in place of it, after each start has left its process number in `starts`."""
    program = run.root / "stand-in"
    program.write_text(f"#!/bin/sh\necho $$ >> {run.root / 'starts'}\n{script}\n")
    program.chmod(0o700)
    return Forwarder(run, python=str(program), environment=dict(os.environ))


_UNTIL_THE_END = 'while ! grep -q SUCCEEDED "$3/status.json"; do sleep 0.02; done'


def _starts(run: RunDir) -> list[int]:
    file = run.root / "starts"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _warnings(run: RunDir) -> list[str]:
    return [event["message"] for event in records.read_all(run.events) if event["kind"] == "warning"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_one_that_is_killed_is_started_again_and_told(number: signal.Signals, run: RunDir) -> None:
    forwarder = _forwarder(run, _UNTIL_THE_END)
    forwarder.keep_running()
    _until(lambda: len(_starts(run)) == 1)
    os.kill(_starts(run)[0], number)
    _until(lambda: len(_starts(run)) == 2 and len(_warnings(run)) == 1)
    assert forwarder.pids() == _starts(run)[1:]
    assert "started again" in _warnings(run)[0]
    assert str(-number) in _warnings(run)[0]
    Status(state="SUCCEEDED", updated=6.0).write(run)
    forwarder.finish(20, generation=0)
    assert len(_warnings(run)) == 1


def test_one_that_ends_before_its_run_is_started_again(run: RunDir) -> None:
    forwarder = _forwarder(run, f"[ $(wc -l < {run.root / 'starts'}) = 1 ] && exit 0\n{_UNTIL_THE_END}")
    forwarder.keep_running()
    _until(lambda: len(_starts(run)) == 2)
    Status(state="SUCCEEDED", updated=6.0).write(run)
    forwarder.finish(20, generation=0)
    assert len(_starts(run)) == 2


def test_one_that_cannot_start_is_given_up_and_told(run: RunDir) -> None:
    forwarder = _forwarder(run, "exit 3")
    forwarder.keep_running()
    _until(lambda: len(_starts(run)) == 3)
    forwarder.finish(20, generation=0)
    assert len(_starts(run)) == 3
    assert "ended with exit status 3; see" in _warnings(run)[-1]


def test_without_mlflow_another_start_is_of_no_use(run: RunDir) -> None:
    forwarder = _forwarder(run, f"exit {NO_MLFLOW}")
    forwarder.keep_running()
    forwarder.finish(20, generation=0)
    assert len(_starts(run)) == 1
    assert _warnings(run) == []


def test_what_it_lost_after_the_run_is_no_reason_to_start_again(run: RunDir) -> None:
    forwarder = _forwarder(run, f"{_UNTIL_THE_END}; exit 1")
    forwarder.keep_running()
    Status(state="SUCCEEDED", updated=6.0).write(run)
    forwarder.finish(20, generation=0)
    assert len(_starts(run)) == 1
    assert "exit status 1" in _warnings(run)[0]


def test_one_that_hangs_is_ended_in_time(run: RunDir) -> None:
    forwarder = _forwarder(run, "exec sleep 100")
    forwarder.keep_running()
    _until(lambda: len(_starts(run)) == 1)
    forwarder.finish(0.1, generation=2)
    assert len(_starts(run)) == 1
    assert _warnings(run) == [f"the metrics forwarder was not done after 0.1 s; see {run.forwarder_log}"]


def test_one_that_never_started_is_not_waited_for(run: RunDir) -> None:
    _forwarder(run, "exit 0").finish(20, generation=0)
    assert _starts(run) == []
