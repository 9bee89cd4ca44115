"""The process that finishes checkpoints is replaced when it ends, but not for ever."""

from __future__ import annotations

import itertools
import pathlib
import shutil
import time

import pytest

from sgpu.agent import checkpoint_helper
from sgpu.agent.checkpoint_helper import CheckpointHelper
from sgpu.agent.judging import kernel_view
from sgpu.contract.policies import RestartPolicy
from sgpu.contract.records import read_all
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking


def _helper(folder: pathlib.Path, python: str) -> CheckpointHelper:
    run = RunDir(folder / "run")
    run.create()
    spec = RunSpec(
        id=run.id, name="test", created=time.time(), backend="local", world_size=1, gpus_per_node=1, accelerator="cpu",
        seed=1, tracking=Tracking(uri="", experiment="test"), python=python, working_dir=str(folder),
        restarts=RestartPolicy(hang_seconds=2.0),
    )  # fmt: skip
    return CheckpointHelper(run, spec, node=0, address="127.0.0.1", log=run.agent_log, environment={})


def test_one_that_ends_at_once_is_replaced_three_times(tmp_path: pathlib.Path) -> None:
    false = shutil.which("false")
    assert false is not None
    helper = _helper(tmp_path, false)
    helper.open()
    helper._watcher.join(60)
    told = [event["message"] for event in read_all(helper._run.events)]
    assert len(told) == 4, told
    assert all("ended with exit status 1" in message for message in told)
    assert [message.endswith("another is started") for message in told] == [True, True, True, False]
    assert "each worker starts one of its own" in told[-1]
    helper.close(5)


@pytest.mark.parametrize(
    ("running", "cpu_seconds", "answers_at", "alive", "asked"),
    [
        (1, 0.01, 4, True, 4),  # it has to wait for a core, on a machine that is overloaded
        (1, 0.01, 99, False, 6),  # for too long
        (1, 0.50, 4, False, 1),  # it has worked, and not answered
        (0, 0.00, 4, False, 1),  # it stands still
    ],
)
def test_one_that_gets_no_core_is_asked_again(
    running: int, cpu_seconds: float, answers_at: int, alive: bool, asked: int, tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    times, used = itertools.count(1.0), itertools.count(1)
    questions: list[float] = []

    def answers(_name: str, seconds: float) -> bool:
        questions.append(seconds)
        return len(questions) >= answers_at

    def look(_pid: int) -> str:
        cpu = cpu_seconds * next(used)
        return f"time: {next(times)}\nstate: S (x)\ncpu_seconds: {cpu:.2f}\nrunning_threads: {running}\n"

    monkeypatch.setattr(checkpoint_helper, "answers", answers)
    monkeypatch.setattr(kernel_view, "look", look)
    assert _helper(tmp_path, "python")._answers(1) is alive
    assert questions == [pytest.approx(2 / 3)] * asked
