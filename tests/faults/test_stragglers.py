"""A rank that holds the others up is named, with what it is slow in; and none is before it does."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from sgpu import distributed
from sgpu.contract.records import read_all
from sgpu.contract.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def _train(slow: dict[int, str], equal_steps: int, slow_steps: int, kind: str) -> int:
    """Work is sleep: it takes as long on a busy machine. All wait for the slowest in each backward, or after it."""
    import time

    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP

    import sgpu

    sgpu.runtime.init()
    mine = slow.get(sgpu.runtime.rank(), "")

    class Samples(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return equal_steps + slow_steps

        def __getitem__(self, index: int) -> torch.Tensor:
            if "data" in slow.values():
                time.sleep(0.06 if mine == "data" and index >= equal_steps else 0.01)  # storage that is slow
            return torch.ones(2)

    def works() -> None:
        time.sleep(0.07 if mine == "compute" and loop.step >= equal_steps else 0.03)

    class Works(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            if kind == "fully_shard":
                works()
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if kind != "fully_shard":
                works()
            return grad

    class Layer(torch.nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return Works.apply(super().forward(value))

    model: torch.nn.Module = torch.nn.Sequential(Layer(2, 2), torch.nn.BatchNorm1d(2))
    if kind == "DDP":
        model = DDP(model)
    elif kind == "fully_shard":
        model = torch.nn.Sequential(fully_shard(Layer(2, 2)), fully_shard(torch.nn.Linear(2, 2)))
        fully_shard(model)
    loader = torch.utils.data.DataLoader(Samples(), sampler=range(equal_steps + slow_steps), batch_size=1)
    loop = sgpu.TrainLoop(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), loader=loader)
    for batch in loop:
        model(batch.repeat(2, 1)).sum().backward()
        if kind == "own":
            with sgpu.runtime.waiting():
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
    return loop.step


def _told(slow: dict[int, str], *, equal_steps: int, slow_steps: int, kind: str = "DDP") -> list[dict[str, Any]]:
    run = distributed(gpus=max(slow) + 1)(_train).submit(slow, equal_steps, slow_steps, kind)
    assert set(run.result(100)) == {equal_steps + slow_steps}
    assert run.status.restarts == 0
    return [event for event in read_all(RunDir(pathlib.Path(run.path)).events) if event["kind"] == "straggler"]


@pytest.mark.parametrize("kind", ["DDP", *(["fully_shard", "own"] if os.environ.get("NIGHTLY") == "true" else [])])
def test_one_of_two_that_computes_longer_is_named_within_five_windows(kind: str) -> None:
    (told,) = _told({1: "compute"}, equal_steps=90, slow_steps=110, kind=kind)
    assert (told["rank"], told["section"]) == (1, "compute")
    assert told["ratio"] > 1.3
    assert 0.06 < told["seconds"] < 5
    assert told["step"] > 90


def test_of_three_each_is_named_for_what_it_is_slow_in() -> None:
    told = _told({1: "data", 2: "compute"}, equal_steps=0, slow_steps=90)
    assert sorted((event["rank"], event["section"]) for event in told) == [(1, "data"), (2, "compute")]
    assert all(event["ratio"] > 1.3 for event in told)
