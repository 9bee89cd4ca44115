"""Where every second of every rank went, over all that can happen to a run: the parts are wall time times ranks."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from sgpu import Local, RestartPolicy, Run, distributed
from sgpu.contract import process
from sgpu.contract.heartbeat import Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_SHARE = 0.01


class Lives:
    """A run's lives as a bystander times them: each is no shorter than what is seen of it, and no longer than asked."""

    def __init__(self) -> None:
        self._least = self._most = 0.0

    def add(self, run: Run, *, asked_at: float, seen_at: float | None = None) -> None:
        """The newest life. `seen_at`: when it was seen alive for the last time; None: its end is among the events."""
        events = [event for event in run.events() if event["time"] >= asked_at]
        times = {event["kind"]: event["time"] for event in events if event["kind"] in ("run_started", "run_ended")}
        self._least += (times["run_ended"] if seen_at is None else seen_at) - times["run_started"]
        self._most += time.time() - asked_at

    def check(self, run: Run) -> dict[str, float]:
        report = run.goodput()
        each = [sum(beat.ledger_seconds().values()) for beat in Page(_page(run)).beats()]
        assert min(each) > (1 - _SHARE) * max(each), "every rank has the same wall time"
        assert report.wall_seconds == pytest.approx(max(each), rel=_SHARE)
        assert sum(report.seconds.values()) == pytest.approx(report.wall_seconds * report.ranks, rel=_SHARE)
        assert (1 - _SHARE) * self._least <= report.wall_seconds <= (1 + _SHARE) * self._most
        assert min(report.seconds.values()) >= 0
        assert report.goodput == pytest.approx(report.seconds["productive"] / sum(report.seconds.values()))
        time.sleep(0.2)  # an ended run's ledger does not go on
        assert run.goodput() == report
        return report.seconds


def _page(run: Run) -> pathlib.Path:
    return pathlib.Path(run.path) / "heartbeat.page"


def _agent(run: Run) -> process.ProcessId:
    agent = process.read_process(pathlib.Path(run.path) / "agent.json")
    assert agent is not None
    return agent


def _kinds(run: Run) -> list[str]:
    return [event["kind"] for event in run.events()]


def test_a_run_of_many_lives(
    tmp_path: pathlib.Path, until: Callable[..., Any], members: Callable[[Run], list[int]]
) -> None:
    """A rank is killed, then all; the run is preempted; its agent is killed; at last it succeeds, one rank early."""

    @distributed(gpus=2)
    def train(folder: str) -> int:
        import pathlib
        import time

        import torch

        import sgpu
        from sgpu import TrainLoop

        sgpu.runtime.init()
        model = torch.nn.Linear(1, 1)
        loop = TrainLoop(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_steps=10**6, checkpoint_every=10
        )
        for _ in loop:
            time.sleep(0.02)
            if pathlib.Path(folder, "end").exists() and loop.step % 10 == 5:
                break
        if sgpu.runtime.rank() == 1:
            time.sleep(1.0)  # the other one waits
        return loop.step

    def pids() -> list[int]:
        return [beat.pid for beat in Page(_page(run)).beats()]

    lives, asked_at = Lives(), time.time()
    run = train.submit(str(tmp_path))
    until(lambda: run.status.step > 15, "it trains")
    os.kill(pids()[1], signal.SIGKILL)
    until(lambda: _kinds(run).count("resumed") == 1, "it trains again")
    until(lambda: run.status.step > 25, "beyond where it was")
    for pid in pids():
        os.kill(pid, signal.SIGKILL)
    until(lambda: _kinds(run).count("resumed") == 2, "and again")
    assert _agent(run).signal(signal.SIGTERM), "the fault did not fire"
    assert run.wait(60) == "PREEMPTED"
    lives.add(run, asked_at=asked_at)
    first = lives.check(run)
    assert all(first[name] > 0 for name in ("starting", "productive", "checkpoint", "restoring", "restarting"))
    assert first["recomputing"] > 0.02, "what was trained after the checkpoint, twice"

    asked_at = time.time()
    run.resume()
    step = run.status.step
    until(lambda: run.status.step > step + 5, "it trains in its second life")
    agent, seen_at = _agent(run), time.time() - 1  # by what the agent says twice a second
    assert agent.signal(signal.SIGKILL), "the fault did not fire"
    until(lambda: not agent.alive() and members(run) == [], "the workers end with it")
    lives.add(run, asked_at=asked_at, seen_at=seen_at)
    assert run.state == "LOST"
    report = run.goodput()
    assert sum(report.seconds.values()) == pytest.approx(report.wall_seconds * 2, rel=_SHARE)

    asked_at = time.time()
    (tmp_path / "end").touch()
    run.resume()
    assert run.wait(60) == "SUCCEEDED"
    lives.add(run, asked_at=asked_at)
    last = lives.check(run)
    assert last["idle"] - first["idle"] > 1.8, "both ranks' second after the loop"
    assert last["starting"] > first["starting"]


def test_two_nodes_that_become_one_and_two_again(tmp_path: pathlib.Path, until: Callable[..., Any]) -> None:
    @distributed(gpus=4, on=Local(nodes=2), restarts=RestartPolicy(min_gpus=2))
    def train(folder: str) -> int:
        import pathlib
        import time

        import torch
        from torch.utils.data import TensorDataset

        import sgpu
        from sgpu import TrainLoop
        from sgpu.data import DataLoader

        sgpu.runtime.init()
        model = torch.nn.Linear(1, 1)
        numbers = torch.arange(32, dtype=torch.float32)
        loader = DataLoader(TensorDataset(numbers), global_batch_size=8, shuffle=True, seed=5, num_workers=0)
        loop = TrainLoop(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loader=loader, epochs=10**6,
            checkpoint_every=5,
        )  # fmt: skip
        for _ in loop:
            time.sleep(0.02)
            if pathlib.Path(folder, "end").exists() and loop.step % 50 == 5:
                break
        return sgpu.runtime.world_size()

    def resized() -> list[int]:
        return [event["to_world_size"] for event in run.events() if event["kind"] == "resized"]

    lives, asked_at = Lives(), time.time()
    run = train.submit(str(tmp_path))
    until(lambda: run.status.step > 8, "it trains", 90)
    agent = process.read_process(pathlib.Path(run.path) / "nodes" / "1" / "agent.json")
    assert agent is not None
    family = [agent.pid, *process.descendants(agent.pid)]
    for pid in family:
        os.kill(pid, signal.SIGKILL)
    until(lambda: resized() == [2], "it goes on with one node", 60)
    until(lambda: resized() == [2, 4], "and with both again", 90)
    (tmp_path / "end").touch()
    assert run.result(90) == [4] * 4
    lives.add(run, asked_at=asked_at)
    seconds = lives.check(run)
    beats = [beat.ledger_seconds() for beat in Page(_page(run)).beats()]
    assert min(beats[2]["idle"], beats[3]["idle"]) > max(beats[0]["idle"], beats[1]["idle"]), "nobody worked there"
    assert seconds["restarting"] > 0
    assert seconds["productive"] > 0
