"""One rank's data come late: it is named, and nothing else happens."""

from __future__ import annotations

import pathlib

import pytest

from sgpu import distributed
from sgpu.contract.records import read_all
from sgpu.contract.rundir import RunDir

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def _train() -> int:
    import time
    from collections.abc import Iterator

    import torch
    import torch.distributed as dist

    import sgpu

    class Samples(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.06 if sgpu.runtime.rank() == 1 else 0.01)  # storage that is slow
            return torch.ones(2)

        def __iter__(self) -> Iterator[torch.Tensor]:
            return (self[index] for index in range(len(self)))

    sgpu.runtime.init()
    loop = sgpu.TrainLoop(loader=torch.utils.data.DataLoader(Samples(), batch_size=1), max_steps=170)
    for _ in loop:
        dist.all_reduce(torch.ones(1))
    return loop.step


def test_a_rank_with_slow_storage_is_named() -> None:
    run = distributed(gpus=2)(_train).submit()
    assert run.result(100) == [170, 170]
    told = [event for event in read_all(RunDir(pathlib.Path(run.path)).events) if event["kind"] == "straggler"]
    assert [event["rank"] for event in told] == [1], "once"
    assert told[0]["ratio"] > 1.3
    assert told[0]["data_seconds"] > 0.05
    assert run.status.restarts == 0
