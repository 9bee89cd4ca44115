"""Agents of nodes whose controller is gone, and which stand still so that they do not notice."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

import sgpu
from sgpu import leftovers
from sgpu.contract import process
from sgpu.contract.process import ProcessId
from sgpu.contract.rundir import RunDir, runs_folder
from sgpu.testing.laws.worker import make_run


@pytest.fixture
def agent() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
    yield child
    child.kill()
    child.wait()


def _run(home: pathlib.Path, agent: subprocess.Popen[bytes], controller: ProcessId) -> RunDir:
    root = runs_folder(home) / "20260101-000000-train-aaaaaa"
    make_run(root, world_size=2)
    run = RunDir(root)
    run.node(1).root.mkdir()
    found = process.process_of(agent.pid)
    assert found is not None
    found.write(run.node(1).agent)
    controller.write(run.agent)
    return run


def test_a_frozen_agent_without_a_controller_is_ended(home: pathlib.Path, agent: subprocess.Popen[bytes]) -> None:
    run = _run(home, agent, ProcessId(pid=agent.pid, started=1))  # its number is another process' by now
    agent.send_signal(signal.SIGSTOP)
    assert sgpu.cleanup() == [f"the agent of node 1 of run {run.id}, whose controller is gone: ended"]
    assert agent.wait(10) == -signal.SIGKILL
    assert sgpu.cleanup() == []


def test_an_agent_with_a_controller_is_left_alone(home: pathlib.Path, agent: subprocess.Popen[bytes]) -> None:
    _run(home, agent, process.this_process())
    assert sgpu.cleanup() == []
    assert agent.poll() is None


def test_a_node_is_ended_with_what_its_workers_started(home: pathlib.Path, agent: subprocess.Popen[bytes]) -> None:
    run = _run(home, agent, process.this_process())
    strays = [
        subprocess.Popen(
            [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(10_000)"],
            stdout=subprocess.PIPE,
            env={"SGPU_RUN_DIR": str(run.root), "GROUP_RANK": node},
        )
        for node in ("0", "1")
    ]
    try:
        assert [stray.stdout.readline() for stray in strays if stray.stdout is not None] == [b"here\n"] * 2
        leftovers.end_node(run, 1)
        assert agent.wait(10) == -signal.SIGKILL
        assert strays[1].wait(10) == -signal.SIGKILL
        assert strays[0].poll() is None, "it is another node's"
    finally:
        for stray in strays:
            stray.kill()
            stray.communicate()
