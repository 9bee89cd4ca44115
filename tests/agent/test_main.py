"""The agent's own failure is told, and hides no result."""

from __future__ import annotations

import pathlib

import pytest

from sgpu.agent.control import _tell_lost
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import FINAL_STATES, State, Status, read_status


@pytest.fixture
def run(tmp_path: pathlib.Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.create()
    return run


@pytest.mark.parametrize("state", ["STARTING", "RUNNING", "RESTARTING", None])
def test_a_supervisor_that_fails_leaves_a_lost_run(state: State | None, run: RunDir) -> None:
    if state is not None:
        Status(state=state, updated=5.0, started=4.0, step=7).write(run)
    _tell_lost(run)
    status = read_status(run)
    assert status is not None
    assert (status.state, status.step) == ("LOST", 7 if state else 0)
    assert status.ended is not None
    assert status.failure is not None
    assert str(run.agent_log) in status.failure["message"]


@pytest.mark.parametrize("state", sorted(FINAL_STATES))
def test_a_failure_while_clearing_up_takes_no_result_away(state: State, run: RunDir) -> None:
    Status(state=state, updated=5.0, started=4.0, ended=5.0).write(run)
    before = read_status(run)
    _tell_lost(run)
    assert read_status(run) == before
