"""A drill strikes a real run, once, and tells what that cost."""

from __future__ import annotations

import pytest

from sgpu import distributed
from sgpu.testing import Fault, FaultPlan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_mlflow", "agents_end")]


def train(steps: int) -> float:
    import torch

    import sgpu
    from sgpu import TrainLoop

    sgpu.runtime.init()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = TrainLoop(model=model, optimizer=optimizer, max_steps=steps, checkpoint_every=2)
    for _ in loop:
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    return float(model.weight.detach())


def test_a_drill_tells_what_was_lost() -> None:
    kill, corrupt, missed = Fault("kill", rank=1, step=6), Fault("corrupt", step=8), Fault("raise", rank=0, step=50)
    report = distributed(gpus=2)(train).drill(FaultPlan(kill, corrupt, missed), 10)
    assert (report.state, report.error) == ("SUCCEEDED", None)
    assert report.fired == (kill, corrupt)
    assert report.missed == (missed,)
    (recovery,) = report.recoveries
    assert recovery.rank == 1
    assert "SIGKILL" in recovery.told
    assert recovery.seconds is not None
    assert 0 < recovery.seconds == report.lost_seconds
    assert 0 <= report.lost_steps <= 5
    assert 0 < report.goodput < 1
    told = str(report)
    assert "did not fire: raise: rank 0 in step 50" in told
    assert "fired: kill: rank 1 in step 6" in told


def test_a_drill_that_ends_the_run_says_how() -> None:
    report = distributed(gpus=2)(train).drill(FaultPlan(Fault("disk full")), 10)
    assert report.state == "FAILED"
    assert report.error is not None
    assert "No space left on device" in report.error or "no space" in report.error.lower()
    assert report.recoveries[0].seconds is None
    assert "not survived" in str(report)
    assert len(report.run.resume().result(60)) == 2, "the drill is over: its faults are not met again"
