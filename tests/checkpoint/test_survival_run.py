"""A real run: a rank is killed between staging and commit; the agent's helper commits, the restart is from memory."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import cloudpickle

import sgpu
from sgpu import distributed

# The helper is one process: the first two shards are those of step 2.
HELD = "checkpoint.shard_written#3=sleep:3; checkpoint.shard_written#4=sleep:3"

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def job(fired: str) -> float:
    import os
    import pathlib
    import signal
    import time

    import torch

    from sgpu import TrainLoop, settings

    def both_are_written() -> bool:
        log = pathlib.Path(fired)
        return log.exists() and log.read_text().count("checkpoint.shard_written") == 2

    sgpu.runtime.init()
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for step in TrainLoop(model=model, optimizer=optimizer, max_steps=6, checkpoint_every=2):
        if step == 5 and settings.generation() == 0 and sgpu.runtime.rank() == 1:
            deadline = time.monotonic() + 60
            while not both_are_written() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert both_are_written()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = model(torch.randn(4, 100)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_a_killed_run_goes_on_from_memory(tmp_path: pathlib.Path, without_mlflow: None) -> None:
    log = tmp_path / "fired.log"
    env = {"SGPU_FAILPOINT": HELD, "SGPU_FAILPOINT_LOG": str(log)}
    run = distributed(gpus=2, restarts=1, env=env)(job).submit(str(log))
    results: list[Any] = []
    try:
        results = run.result(timeout_seconds=100)
    finally:
        run.cancel()
        sgpu.cleanup()
    assert len(results) == 2
    restored = [event for event in run.events() if event["kind"] == "restored"]
    assert [(event["step"], event["source"]) for event in restored] == [(4, "memory")]
    assert [event["cause"] for event in run.events() if event["kind"] == "failure"] == ["SIGKILL, signal 9"]
