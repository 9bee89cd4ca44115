"""What the exact position and the draws of each sample cost, against torch's own loader over the same data set.

Three loaders take turns, epoch by epoch, with workers that live on: torch's, ours without seeding before each sample,
and ours. `position` is the time a sample of the second over the first, less one (goal: 3 %, and the noise of two equal
loaders is told beside it); `draws_us` is what the third takes more than the second (goal: 15 us), over data sets that
draw and such that do not. All times are of the CPU, of this process and its workers, since that is what limits both
where data are made, and other processes of the machine do not count. Medians over rounds of the differences in a round.

- tensors: torch's TensorDataset of 32 numbers and a label
- drawing: the same with a draw of Python, NumPy and torch each
- decoding: about 1 ms of inflating and arithmetic, as an image of 100 kB takes
"""

from __future__ import annotations

import contextlib
import random
import statistics
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, TensorDataset

from sgpu.data import DataLoader
from sgpu.data.ordering.draws import Draws
from sgpu.data.positions import streams
from tests.benchmarks.cpu import CpuClock

BATCH = 32


class Drawing(Dataset[Any]):
    """Adds noise of every kind."""

    def __init__(self, count: int) -> None:
        self.features = torch.zeros(count, 32)

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, number: int) -> Any:
        return self.features[number] + torch.rand(32), random.random() + np.random.rand()


class Decoding(Dataset[Any]):
    """Inflates a record and normalises it."""

    def __init__(self, count: int) -> None:
        record = np.random.default_rng(0).integers(0, 12, 100_000, dtype=np.uint8)
        self.count, self.record = count, zlib.compress(record.tobytes())

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        pixels = np.frombuffer(zlib.decompress(self.record), np.uint8)
        return torch.from_numpy((pixels / np.float32(12))[:150].copy()), number


def tensors(count: int) -> Dataset[Any]:
    return TensorDataset(torch.zeros(count, 32), torch.arange(count))


KINDS: dict[str, tuple[Callable[[int], Dataset[Any]], int]] = {
    "tensors": (tensors, 3200), "drawing": (Drawing, 3200), "decoding": (Decoding, 640),
}  # fmt: skip


def run(quick: bool) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for kind, (make, count) in KINDS.items():
        for workers in (0, 2):
            taken = _taken(make(count), workers, rounds=3 if quick else 25)
            a_sample = {name: [1e6 * each / count for each in times] for name, times in taken.items()}
            torchs = statistics.median(a_sample["torch"])
            rows.append({
                "data": kind, "workers": workers, "torch_us": torchs, "sgpu_us": statistics.median(a_sample["sgpu"]),
                "position": _more(a_sample, "position", "torch") / torchs,
                "noise": abs(_more(a_sample, "again", "torch")) / torchs,
                "draws_us": _more(a_sample, "sgpu", "position"),
            })  # fmt: skip
    return rows


def _more(a_sample: dict[str, list[float]], name: str, than: str) -> float:
    return statistics.median(one - other for one, other in zip(a_sample[name], a_sample[than], strict=True))


def _taken(dataset: Dataset[Any], workers: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each epoch by loader; "again" is a second one of torch's."""
    torchs: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loaders: dict[str, Any] = {
        "torch": TorchLoader(dataset, BATCH, shuffle=True, **torchs),
        "position": DataLoader(dataset, BATCH, shuffle=True, num_workers=workers),
        "sgpu": DataLoader(dataset, BATCH, shuffle=True, num_workers=workers),
        "again": TorchLoader(dataset, BATCH, shuffle=True, **torchs),
    }
    taken: dict[str, list[float]] = {name: [] for name in loaders}
    order = list(loaders)
    for turn in range(rounds + 1):  # the first starts the workers
        random.shuffle(order)
        for name in order:
            with _undrawn() if name == "position" else contextlib.nullcontext():
                clock = CpuClock()
                for _ in loaders[name]:
                    pass
            if turn:
                taken[name].append(clock.seconds())
    for name in ("position", "sgpu"):
        loaders[name].close()
    return taken


@contextlib.contextmanager
def _undrawn() -> Iterator[None]:
    """Nothing is seeded before samples, and nothing needs to be put back after them."""
    with mock.patch.object(Draws, "begin", _nothing), mock.patch.object(streams, "preserved", contextlib.nullcontext):
        yield


def _nothing(self: Draws, state: int) -> None:
    """In the place of Draws.begin."""
