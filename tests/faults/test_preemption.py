"""A run that is told to go saves first, at one step on all ranks, and a resumed one goes on with exactly the next."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Callable
from typing import Any

import pytest

from sgpu import Run, distributed
from sgpu.contract import process
from sgpu.contract.errors import RunCancelledError

pytestmark = pytest.mark.slow


def test_preempted_and_cancelled_runs_lose_no_step(
    tmp_path: pathlib.Path, until: Callable[..., Any], left: Callable[[Run], list[int]]
) -> None:
    @distributed(gpus=2)
    def train(folder: str) -> float:
        import pathlib
        import random
        import time

        import numpy as np
        import torch

        import sgpu
        from sgpu import TrainLoop

        here, rank = pathlib.Path(folder), sgpu.runtime.rank()
        sgpu.runtime.init()
        with (here / f"draws{rank}").open("a") as log:
            log.write(f"{random.random()} {np.random.rand()} {float(torch.rand(()))}\n")
        model = torch.nn.Linear(1, 1)
        loop = TrainLoop(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            max_steps=int((here / "steps").read_text()), checkpoint_every=10**6,
        )  # fmt: skip
        for step in loop:
            with (here / f"steps{rank}").open("a") as log:
                log.write(f"{step}\n")
            time.sleep(0.01)
        return float(torch.rand(()))

    def done(rank: int) -> list[int]:
        file = tmp_path / f"steps{rank}"
        return [int(line) for line in file.read_text().splitlines()] if file.exists() else []

    (tmp_path / "steps").write_text("1000000")
    run = train.submit(str(tmp_path))
    until(lambda: len(done(0)) > 5 and len(done(1)) > 5, "both ranks train")
    agent = process.read_process(pathlib.Path(run.path) / "agent.json")
    assert agent is not None
    assert agent.signal(signal.SIGTERM), "the fault did not fire"
    assert run.wait(60) == "PREEMPTED"
    with pytest.raises(RunCancelledError, match="was preempted after step"):
        run.result(1)
    assert done(0) == done(1) == list(range(len(done(0))))
    assert left(run) == []

    run.resume()
    until(lambda: "restored" in {event["kind"] for event in run.events()}, "restored")
    before = len(done(0))
    until(lambda: len(done(0)) > before + 5 and len(done(1)) > before + 5, "both ranks train again")
    run.cancel()
    assert run.state == "CANCELLED"
    assert done(0) == done(1) == list(range(len(done(0)))), "no step twice, none missing"

    total = len(done(0)) + 3
    (tmp_path / "steps").write_text(str(total))
    results = run.resume().result(90)
    assert done(0) == done(1) == list(range(total))
    assert len(set(results)) == 2, "each rank has its own stream"
    for rank in (0, 1):
        draws = (tmp_path / f"draws{rank}").read_text().splitlines()
        assert len(draws) == 3
        assert len(set(draws)) == 1, "a restart draws what the first start drew"
    assert (tmp_path / "draws0").read_text() != (tmp_path / "draws1").read_text()
    kinds = [event["kind"] for event in run.events()]
    assert (kinds.count("preempted"), kinds.count("restored"), kinds.count("run_ended")) == (1, 2, 3)
    assert left(run) == []
