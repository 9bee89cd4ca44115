"""Real runs whose checkpoints cannot be written: the end at once with the disk's own message, or training goes on."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import cloudpickle
import pytest

import sgpu
from sgpu import CheckpointPolicy, RestartPolicy, distributed
from sgpu.checkpoint import Catalog
from sgpu.contract.errors import CheckpointSaveError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def job() -> int:
    import torch

    from sgpu import TrainLoop

    sgpu.runtime.init()
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loop = TrainLoop(model=model, optimizer=optimizer, max_steps=6, checkpoint_every=2)
    for _ in loop:
        optimizer.zero_grad()
        model(torch.randn(4, 10)).square().mean().backward()
        optimizer.step()
    return loop.step


@pytest.fixture
def start(tmp_path: pathlib.Path, without_mlflow: None) -> Any:
    def do(how: Any, failpoint: str) -> Any:
        env = {"SGPU_FAILPOINT": failpoint, "SGPU_FAILPOINT_LOG": str(tmp_path / "fired.log")}
        policy = CheckpointPolicy(str(tmp_path / "root"), on_error=how)
        restarts = RestartPolicy(max_restarts=3, backoff_seconds=0.01)
        return distributed(gpus=2, restarts=restarts, checkpoints=policy, env=env)(job).submit()

    yield do
    sgpu.cleanup()


def test_a_full_disk_ends_the_run_at_once_with_its_own_message(start: Any, tmp_path: pathlib.Path) -> None:
    run = start("raise", "checkpoint.staged@1#2=errno:ENOSPC")
    try:
        with pytest.raises(CheckpointSaveError, match=r"rank 1: \[Errno 28\].*Free some space") as caught:
            run.result(timeout_seconds=100)
    finally:
        run.cancel()
    assert len((tmp_path / "fired.log").read_text().splitlines()) == 1
    error = caught.value
    assert (error.rank, error.step, error.unrecoverable) == (1, 4, True)
    assert error.needed_bytes > 0
    assert error.free_bytes > 0
    assert run.status.restarts == 0
    assert Catalog(tmp_path / "root").latest() == 2
    again = start("raise", "")  # at once, into the same root
    try:
        assert again.result(timeout_seconds=100) == [6, 6]
    finally:
        again.cancel()
    assert Catalog(tmp_path / "root").latest() == 6


def test_under_warn_it_goes_on_and_tells(start: Any, tmp_path: pathlib.Path) -> None:
    run = start("warn", "checkpoint.staged@1#2=errno:ENOSPC")
    try:
        assert run.result(timeout_seconds=100) == [6, 6]
    finally:
        run.cancel()
    assert len((tmp_path / "fired.log").read_text().splitlines()) == 1
    (failed,) = [event for event in run.events() if event["kind"] == "checkpoint_failed"]
    assert failed["step"] == 4
    assert "Free some space" in failed["message"]
    assert Catalog(tmp_path / "root").steps() == [2, 6]
