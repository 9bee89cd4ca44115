"""A rank that hangs before its loop has begun: its peers wait for it in DDP's constructor."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from sgpu import RestartPolicy, Run, distributed

pytestmark = pytest.mark.slow


def test_a_rank_that_hangs_before_its_loop_is_named_with_its_stack(
    tmp_path: pathlib.Path, members: Callable[[Run], list[int]]
) -> None:
    @distributed(gpus=2, restarts=RestartPolicy(start_seconds=3.0))
    def train(folder: str) -> int:
        import pathlib
        import time

        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        import sgpu
        from sgpu import TrainLoop, settings

        def downloads_for_ever() -> None:
            pathlib.Path(folder, "fired").touch()
            time.sleep(10_000)

        sgpu.runtime.init()
        if settings.generation() == 0 and sgpu.runtime.rank() == 1:
            downloads_for_ever()
        model = DDP(torch.nn.Linear(1, 1))
        loop = TrainLoop(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_steps=3)
        for _ in loop:
            model(torch.ones(1, 1)).sum().backward()
        return loop.step

    run = train.submit(str(tmp_path))
    assert run.result(100) == [3, 3]
    assert (tmp_path / "fired").exists()
    (failure,) = [event for event in run.events() if event["kind"] == "failure"]
    assert (failure["rank"], failure["cause"]) == (1, "no loop for 3 s")
    assert "rank 1 had not begun its loop" in failure["message"]
    waiting, hanging = (
        pathlib.Path(run.path, "attempts", "0", f"rank{rank}", "stacks").read_text() for rank in (0, 1)
    )  # fmt: skip
    assert "downloads_for_ever" in hanging
    assert "distributed.py" in waiting
    assert members(run) == []
