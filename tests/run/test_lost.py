"""A run whose supervisor vanished is told at once, with the step that its workers reached."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import time

import pytest

import sgpu
from sgpu import Run
from sgpu.agent.forwarder import Forwarder
from sgpu.contract.errors import AgentLostError
from sgpu.contract.heartbeat import Page
from sgpu.contract.process import ProcessId
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.contract.status import Status

GONE = ProcessId(pid=2**22 - 1, started=1)


def a_run(home: pathlib.Path) -> RunDir:
    run = RunDir(home / "runs" / "20261130-101500-train-3f9c2a")
    run.create()
    RunSpec(
        id=run.id, name="train", created=time.time(), backend="local", world_size=2, gpus_per_node=2,
        accelerator="cpu", seed=1, tracking=Tracking(uri="", experiment="test"), python=sys.executable,
        working_dir=str(home),
    ).write(run)  # fmt: skip
    return run


def test_lost_at_once_where_a_supervisor_was_there(home: pathlib.Path) -> None:
    run = a_run(home)
    assert Run(run).state == "STARTING", "nobody has started it yet; a scheduler may take its time"
    Status(state="RUNNING", updated=time.time(), step=3, restarts=2, world_size=2).write(run)
    page = Page.create(run.heartbeat, 2)
    for rank in (0, 1):
        slot = page.slot(rank)
        slot.start(0)
        slot.beat(7 + rank, 0, -1)
    page.close()
    GONE.write(run.agent)
    status = Run(run).status
    assert (status.state, status.step, status.restarts) == ("LOST", 7, 2)


@pytest.mark.parametrize(
    ("log", "told"),
    [
        (
            "Traceback\nOSError: [Errno 28] No space left on device: 'x'\n",
            "was full, and .* MB are free there now: make",
        ),
        ("OSError: [Errno 122] Disk quota exceeded\n", "or set SGPU_HOME to a folder elsewhere"),
        ("Traceback\nKeyError: 'x'\n\n", r"ends with \"KeyError: 'x'\""),
        ("rank 0 says that something Error is here\n", "; see "),
        (None, "; see "),
    ],
)
def test_what_the_supervisors_log_tells_is_told(home: pathlib.Path, log: str | None, told: str) -> None:
    run = a_run(home)
    GONE.write(run.agent)
    if log is not None:
        run.agent_log.write_text(log)
    with pytest.raises(AgentLostError, match=told) as caught:
        Run(run).result(0)
    assert str(run.agent_log) in str(caught.value)
    assert str(caught.value).endswith("go on with run.resume()")


def test_a_disk_that_is_full_is_told_where_not_even_the_log_could_be(
    home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run(home)
    GONE.write(run.agent)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    with pytest.raises(AgentLostError, match="was full, and 0 MB are free"):
        Run(run).result(0)


def test_what_writes_metrics_is_ended_where_its_agent_was_killed(home: pathlib.Path) -> None:
    run = a_run(home)
    GONE.write(run.agent)
    program = home / "stand-in"
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o700)
    forwarder = Forwarder(run, python=str(program), environment=dict(os.environ))
    forwarder.keep_running()
    (pid,) = forwarder.pids()
    Status(state="LOST", updated=time.time()).write(run)
    try:
        told = sgpu.cleanup()
        assert f"process {pid} of run {run.id}, whose supervisor is gone: ended" in told
    finally:
        forwarder.finish(0.0, generation=0)


def test_parts_of_files_are_cleaned_up(home: pathlib.Path) -> None:
    run = a_run(home)
    GONE.write(run.agent)
    folder = run.attempt(0, 1)
    folder.mkdir(parents=True)
    part, other = folder / ".outcome.123-456.tmp", folder / "notes.tmp"
    part.touch()
    other.touch()
    assert [line for line in sgpu.cleanup() if str(part) in line]
    assert not part.exists()
    assert other.exists()
    assert not [line for line in sgpu.cleanup() if str(part) in line]
