"""Resuming in the middle of an epoch: seconds until the first new batch, by how far the epoch was.

Ours, and torch's loader with the batches before it drawn and dropped, as everybody does who has no position. "constant"
is the time at the far position over that at the near one; ours must stay within 1.5.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, DistributedSampler

from sgpu.data import DataLoader

BATCH = 8
ROUNDS = 5


class Samples(Dataset[torch.Tensor]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([number])


def run(quick: bool) -> list[dict[str, Any]]:
    near, far = 100, 2_000 if quick else 100_000
    count = (far + 100) * BATCH
    rows: list[dict[str, Any]] = []
    for name, first in (("sgpu", _ours), ("torch, skipping", _skipping)):
        rounds = 1 if quick or name != "sgpu" else ROUNDS
        seconds = {at: statistics.median(first(count, at) for _ in range(rounds)) for at in (near, far)}
        rows += [
            {"loader": name, "batch": at, "seconds": seconds[at], "constant": seconds[at] / seconds[near]}
            for at in (near, far)
        ]
    return rows


def _ours(count: int, batch: int) -> float:
    make = lambda: DataLoader(Samples(count), BATCH, shuffle=True, seed=1, num_workers=0)  # noqa: E731
    state = {**make().state_dict(), "cursor": batch * BATCH}
    began = time.perf_counter()
    loader = make()
    loader.load_state_dict(state)
    next(iter(loader))
    return time.perf_counter() - began


def _skipping(count: int, batch: int) -> float:
    began = time.perf_counter()
    sampler = DistributedSampler(Samples(count), num_replicas=1, rank=0, seed=1)
    iterator = iter(TorchLoader(Samples(count), BATCH, sampler=sampler))
    for _ in range(batch + 1):
        next(iterator)
    return time.perf_counter() - began
