"""A rank that hangs before its loop has begun: its peers wait for it in DDP's constructor. And a learned limit."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable

import pytest

from sgpu import RestartPolicy, Run, distributed

pytestmark = pytest.mark.slow


def test_before_the_loop_and_with_a_learned_limit(
    tmp_path: pathlib.Path, left: Callable[[Run], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGPU_HANG_FLOOR_SECONDS", "1")

    @distributed(gpus=2, restarts=RestartPolicy(start_seconds=4.0))
    def train(folder: str) -> int:
        import pathlib
        import time

        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        import sgpu
        from sgpu import TrainLoop, settings

        def downloads_for_ever() -> None:
            pathlib.Path(folder, "downloads").touch()
            time.sleep(10_000)

        def stalls() -> None:
            pathlib.Path(folder, "stalls").touch()
            time.sleep(10_000)

        sgpu.runtime.init()
        hangs = sgpu.runtime.rank() == 1
        if hangs and settings.generation() == 0:
            downloads_for_ever()
        model = DDP(torch.nn.Linear(1, 1))
        loop = TrainLoop(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_steps=45)
        for _ in loop:
            if hangs and loop.step == 40 and settings.generation() == 1:
                stalls()
            model(torch.ones(1, 1)).sum().backward()
        return loop.step

    run = train.submit(str(tmp_path))
    assert run.result(100) == [45, 45]
    assert (tmp_path / "downloads").exists()
    assert (tmp_path / "stalls").exists()
    first, second = [event for event in run.events() if event["kind"] == "failure"]
    assert (first["rank"], first["cause"]) == (1, "no loop for 4 s")
    assert "rank 1 had not begun its loop " in first["message"]
    assert "s (limit 4 s) after its start; it sleeps or waits" in first["message"]
    assert "in downloads_for_ever at " in first["message"]
    waiting, hanging = (
        pathlib.Path(run.path, "attempts", "0", f"rank{rank}", "stacks").read_text() for rank in (0, 1)
    )  # fmt: skip
    assert "downloads_for_ever" in hanging
    assert "distributed.py" in waiting
    assert (second["rank"], second["step"]) == (1, 40)
    assert "in stalls at " in second["message"]
    learned = re.search(r"\(limit ([\d.]+) s\) in section 'step'", second["message"])
    assert learned is not None
    assert 1 <= float(learned[1]) < 60, (
        "ten times what its steps take here, and not the ten minutes of a run's beginning"
    )
    kept = json.loads(pathlib.Path(run.path, "step_times.json").read_text())
    assert sum(kept["classes"].values()) >= 20
    assert kept["doubted_step"] == 40
    assert left(run) == []
