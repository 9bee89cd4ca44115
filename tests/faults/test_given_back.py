"""A scheduler takes its node back at any moment, and starts the same job again: no step is lost without need.

The job is the batch script of docs/guides/slurm.md; what stands in for Slurm signals it, and starts it again where it
has itself requeued.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import sgpu
from sgpu import RestartPolicy, Run, distributed
from sgpu.contract import process
from sgpu.contract.exits import ExitCode

_GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "slurm.md"
_PLACES = ("first step", "data", "collective", "checkpoint", "set-up", "evaluation")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def _train(folder: str) -> int:
    """Where `at` says, says so once a life, and stays there for a while."""
    import pathlib
    import time

    import torch
    import torch.distributed as dist
    from torch.utils.data import Dataset

    import sgpu
    from sgpu import TrainLoop, settings
    from sgpu.data import DataLoader

    here, rank, life = pathlib.Path(folder), sgpu.runtime.rank(), settings.generation()
    at = (here / "at").read_text()

    def reached(place: str) -> None:
        mark = here / f"reached-{life}-{rank}"
        if at == place and not mark.exists():
            mark.touch()
            time.sleep(1.5)

    class Numbers(Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 10**5

        def __getitem__(self, index: int) -> torch.Tensor:
            if index > 5 and rank == 0:
                reached("data")
            return torch.tensor(float(index))

    sgpu.runtime.init()
    reached("set-up")
    model = torch.nn.Linear(1, 1)
    loop = TrainLoop(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), loader=DataLoader(Numbers(), 1),
        checkpoint_every={"checkpoint": 5, "short": 10}.get(at, 10**6),
    )  # fmt: skip
    for batch in loop:
        if loop.step == (loop.restored.step if loop.restored else 0):
            reached("first step")
        elif rank == 1:
            reached("collective")  # rank 0 is in it, and waits
        dist.all_reduce(torch.ones(1))
        if loop.step % 4 == 3:
            reached("evaluation")
        with (here / f"steps{rank}").open("a") as log:
            log.write(f"{loop.step} {int(batch)}\n")
        time.sleep(0.4 if at == "short" else 0.02)  # "short": so that no step waits for a save under way
        if at == "end" and loop.step % 5 == 4:
            break
    return loop.step


class Scheduled:
    """A run that a batch job trains, life after life."""

    def __init__(self, folder: pathlib.Path, until: Callable[..., Any]) -> None:
        self.folder, self.until = folder, until
        (folder / "at").write_text("nowhere")
        self.run = distributed(gpus=2, restarts=RestartPolicy(backoff_seconds=0.0))(_train).submit(str(folder))
        until(lambda: len(self.steps(0)) > 2, "it trains")
        agent = process.read_process(pathlib.Path(self.run.path) / "agent.json")
        assert agent is not None
        assert agent.signal(signal.SIGUSR1), "the fault did not fire"
        assert self.run.wait(60) == "PREEMPTED"
        until(lambda: not agent.alive(), "the agent is gone")
        self.job: subprocess.Popen[bytes] | None = None
        self.script = self._make_script()
        self.starts = 0

    def _make_script(self) -> pathlib.Path:
        """With `sgpu` and Slurm's `scontrol`, which notes what it is asked for, in a folder of their own."""
        script = re.search(r"^```sh\n(#!/bin/bash\n.*?)^```$", _GUIDE.read_text(), re.M | re.S)
        assert script is not None
        there = self.folder / "bin"
        there.mkdir()
        for name, text in {
            "batch": script[1],
            "sgpu": f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m sgpu."$@"\n',
            "scontrol": f'#!/bin/sh\necho "$@" >> {shlex.quote(str(self.folder / "asked"))}\n',
        }.items():
            (there / name).write_text(text)
            (there / name).chmod(0o755)
        return there / "batch"

    def requeued(self) -> int:
        asked = self.folder / "asked"
        lines = asked.read_text().splitlines() if asked.exists() else []
        assert set(lines) <= {"requeue 7"}
        return len(lines)

    def start(self, at: str, **environment: str) -> None:
        assert self.starts == self.requeued(), "a job that is not in the queue is not started again"
        self.starts += 1
        (self.folder / "at").write_text(at)
        self.lives = len(self.events("run_started"))
        self.before, self.earlier = len(self.steps(0)), self.marks()
        with pathlib.Path(self.run.path, "agent.log").open("ab") as log:
            path = f"{self.script.parent}{os.pathsep}{os.environ['PATH']}"
            self.job = subprocess.Popen(
                [self.script], stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, **environment, "RUN": self.run.path, "SLURM_JOB_ID": "7", "PATH": path},
            )  # fmt: skip
        self.until(lambda: len(self.events("run_started")) > self.lives, "the agent supervises")

    def steps(self, rank: int) -> list[int]:
        return [step for step, _ in self._trained(rank)]

    def batches(self, rank: int) -> list[int]:
        return [batch for _, batch in self._trained(rank)]

    def _trained(self, rank: int) -> list[tuple[int, int]]:
        file = self.folder / f"steps{rank}"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [(int(step), int(batch)) for step, batch in (line.split() for line in lines if line.endswith("\n"))]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.run.events() if event["kind"] == kind]

    def reach(self, ranks: int = 1) -> None:
        """Waits until so many ranks say that they are there."""
        self.until(lambda: len(self.marks() - self.earlier) >= ranks, f"{ranks} ranks are there")

    def marks(self) -> set[pathlib.Path]:
        return set(self.folder.glob("reached-*"))

    def ends(self) -> int:
        assert self.job is not None
        status = self.job.wait(90)
        assert self.run.state == {0: "SUCCEEDED", 75: "PREEMPTED"}.get(status, "FAILED")
        assert self.requeued() == self.starts - (status != 75)
        return status

    def give_back(self, *, everything: Callable[[Run], list[int]] | None = None) -> int:
        """SIGTERM to the job's shell, or to every process of the run; its exit status."""
        assert self.job is not None
        for pid in everything(self.run) if everything is not None else [self.job.pid]:
            with contextlib.suppress(ProcessLookupError):  # some come and go, as the one that writes metrics here
                os.kill(pid, signal.SIGTERM)
        return self.ends()

    def kill(self) -> None:
        if self.job is not None and self.job.poll() is None:
            os.killpg(self.job.pid, signal.SIGKILL)
            self.job.wait()


@pytest.fixture
def scheduled(tmp_path: pathlib.Path, until: Callable[..., Any]) -> Iterator[Scheduled]:
    run = Scheduled(tmp_path, until)
    yield run
    run.kill()
    sgpu.cleanup()


def test_wherever_it_is_the_run_is_saved_and_gone_on_with(
    scheduled: Scheduled, members: Callable[[Run], list[int]], left: Callable[[Run], list[int]]
) -> None:
    for place in _PLACES if os.environ.get("NIGHTLY") == "true" else _PLACES[:4]:
        scheduled.start(place)
        if place == "checkpoint":
            saves = len(scheduled.events("checkpoint_started"))
            scheduled.until(lambda n=saves: len(scheduled.events("checkpoint_started")) > n, "it saves")
        else:
            scheduled.until(lambda: scheduled.events("generation_started"), "it begins")
            scheduled.reach(2 if place == "set-up" else 1)
        if place == "collective":  # told twice, in two ways
            assert scheduled.job is not None
            os.kill(scheduled.job.pid, signal.SIGUSR1)
        # A control group's manager signals all that is in it.
        assert scheduled.give_back(everything=members if place in ("data", "evaluation") else None) == 75, place
        assert scheduled.steps(0) == scheduled.steps(1) == list(range(len(scheduled.steps(0)))), f"{place}: none lost"
        if place not in ("set-up", "first step"):
            assert len(scheduled.steps(0)) > scheduled.before, place
        assert len(scheduled.events("preempted")) == scheduled.lives + 1, "one notice a life"
    assert not scheduled.events("failure")
    scheduled.start("end")
    assert scheduled.ends() == ExitCode.SUCCEEDED
    assert scheduled.steps(0) == list(range(len(scheduled.steps(0))))
    assert scheduled.requeued() == scheduled.starts - 1, "and no more, once it has succeeded"
    for rank in (0, 1):  # each life has gone on with exactly the next batch
        first, second, *_ = batches = scheduled.batches(rank)
        assert batches == list(range(first, first + (second - first) * len(batches), second - first))
    again = subprocess.run(  # the scheduler did not notice: nothing is done twice
        [sys.executable, "-m", "sgpu.agent", scheduled.run.path], capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert again.returncode == 0
    assert "is SUCCEEDED; nothing is left to do" in again.stdout
    assert left(scheduled.run) == []


def test_while_it_restores_or_restarts_and_with_too_little_time(
    scheduled: Scheduled, tmp_path: pathlib.Path, left: Callable[[Run], list[int]]
) -> None:
    fired = tmp_path / "fired"
    scheduled.start("nowhere", SGPU_FAILPOINT="checkpoint.restore=sleep:2", SGPU_FAILPOINT_LOG=str(fired))
    scheduled.until(lambda: fired.exists() and fired.read_text().count("restore") == 2, "both ranks restore")
    assert scheduled.give_back() == 75
    assert len(scheduled.steps(0)) == scheduled.before

    scheduled.start("nowhere", SGPU_FAILPOINT="worker.reboot@0=sleep:2")
    scheduled.until(lambda: len(scheduled.steps(0)) > scheduled.before, "it trains")
    victim = scheduled.events("generation_started")[-1]["generation"]
    pid = next(beat.pid for beat in _beats(scheduled.run) if beat.generation == victim)
    failures = len(scheduled.events("restarting"))
    os.kill(pid, signal.SIGKILL)
    scheduled.until(lambda: len(scheduled.events("restarting")) > failures, "it restarts")
    assert scheduled.give_back() == 75
    committed = len(scheduled.steps(0))

    fired.unlink()
    scheduled.start(
        "short", SGPU_PREEMPT_SECONDS="3", SGPU_FAILPOINT="checkpoint.write=sleep:3.5", SGPU_FAILPOINT_LOG=str(fired)
    )  # fmt: skip
    begun = len(scheduled.events("checkpoint_committed"))
    scheduled.until(lambda: len(scheduled.events("checkpoint_committed")) > begun + 1, "what a save takes is known")
    assert scheduled.give_back() == 75
    assert "checkpoint.write" in fired.read_text()
    warnings = [event["message"] for event in scheduled.events("warning")]
    assert any("no checkpoint of step" in message and "s are left" in message for message in warnings), warnings
    assert len(scheduled.steps(0)) > committed

    scheduled.start("end")
    assert scheduled.ends() == ExitCode.SUCCEEDED
    newest = scheduled.events("restored")[-1]
    assert 0 < newest["step"] <= max(scheduled.steps(0))
    assert sorted(set(scheduled.steps(0))) == list(range(max(scheduled.steps(0)) + 1)), "none is missing"
    assert left(scheduled.run) == []


def _beats(run: Run) -> list[Any]:
    from sgpu.contract.heartbeat import Page

    return Page(pathlib.Path(run.path) / "heartbeat.page").beats()
