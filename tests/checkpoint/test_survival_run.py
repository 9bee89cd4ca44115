"""A real run: a rank is killed between staging and commit; the agent's helper commits, the restart is from memory."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import cloudpickle
import pytest

import sgpu
from sgpu import distributed

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def job() -> float:
    import torch

    from sgpu import TrainLoop

    sgpu.runtime.init()
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = torch.zeros(())
    for _ in TrainLoop(model=model, optimizer=optimizer, max_steps=6, checkpoint_every=2):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 100)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_a_killed_run_goes_on_from_memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "without"
    folder.mkdir()
    (folder / "mlflow.py").write_text("raise ImportError('switched off for this test')\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    log = tmp_path / "fired.log"
    env = {"SGPU_FAILPOINT": "checkpoint.handed@1#2=kill", "SGPU_FAILPOINT_LOG": str(log)}
    run = distributed(gpus=2, restarts=1, env=env)(job).submit()
    # A restarted rank's second save would be killed too, but by then the run has saved steps 4 (from memory) and 6.
    results: list[Any] = []
    try:
        results = run.result(timeout_seconds=100)
    finally:
        run.cancel()
        sgpu.cleanup()
    assert len(results) == 2
    restored = [event for event in run.events() if event["kind"] == "restored"]
    assert [(event["step"], event["source"]) for event in restored] == [(4, "memory")]
    assert "rank=1 nth=2 action=kill" in log.read_text()
