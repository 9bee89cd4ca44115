"""What the exact position and the draws of each sample cost, against torch's own loader over the same data set.

`cost` is the time a sample over torch's, less one; `draws_us` is the time a sample more, in microseconds: it buys that
each sample has random draws of its own. The samples are made by some NumPy work, so that there is something to compare.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from sgpu.data import DataLoader

BATCH = 32


class Working(Dataset[Any]):
    """Each sample takes about so many microseconds."""

    def __init__(self, count: int, microseconds: int) -> None:
        self.count, self.rows = count, np.ones((max(1, microseconds // 8), 4096), np.float32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return np.float32((self.rows * np.float32(number)).sum())


def run(quick: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for microseconds in (0, 1000):
        count = (640 if quick else 4096) * (4 if microseconds == 0 else 1)
        for workers in (0, 2):
            seconds = _alternating(count, microseconds, workers, rounds=1 if quick else 5)
            a_sample = {name: 1e6 * each / count for name, each in seconds.items()}
            more = a_sample["sgpu"] - a_sample["torch"]
            rows.append({
                "sample_us": microseconds, "workers": workers, "torch_us": a_sample["torch"],
                "sgpu_us": a_sample["sgpu"], "cost": more / a_sample["torch"], "draws_us": more,
            })  # fmt: skip
    return rows


def _alternating(count: int, microseconds: int, workers: int, rounds: int) -> dict[str, float]:
    """Median seconds of an epoch with workers that live on; the loaders take turns, so that noise meets both."""
    loaders: dict[str, Any] = {
        "torch": TorchLoader(
            Working(count, microseconds), BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        ),
        "sgpu": DataLoader(Working(count, microseconds), BATCH, shuffle=True, num_workers=workers),
    }
    taken: dict[str, list[float]] = {name: [] for name in loaders}
    for turn in range(rounds + 1):  # the first starts the workers
        for name, loader in loaders.items():
            began = time.perf_counter()
            for _ in loader:
                pass
            if turn:
                taken[name].append(time.perf_counter() - began)
    loaders["sgpu"].close()
    return {name: statistics.median(each) for name, each in taken.items()}
