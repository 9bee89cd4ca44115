"""Data sets that the tests of the loader share."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Numbers(Dataset[int]):
    """Map-style: sample i is i."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> int:
        if not 0 <= number < self.size:
            raise IndexError(number)
        return number


class Wrapped(IterableDataset[int]):
    """One sample a file: the number in its name. Two layers deep, as users nest."""

    def __init__(self, volume: Any) -> None:
        self.inside = {"volume": [volume]}

    def __iter__(self) -> Iterator[int]:
        for path in self.inside["volume"][0]:
            yield int(pathlib.Path(path).stem)


class Doubling(Wrapped):
    """Not one to one: two samples a file."""

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield number
            yield number + 1000


class Skipping(Wrapped):
    """Not one to one: leaves some out."""

    def __iter__(self) -> Iterator[int]:
        return (number for number in super().__iter__() if number % 5)


class Uneven(IterableDataset[int]):
    """No state: worker w of W gives w, w + W, ...; worker 0 stops early."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        stop = self.size // 3 if worker == 0 and workers > 1 else self.size
        yield from range(worker, stop, workers)


class Stateful(IterableDataset[int]):
    """A state of its own, reset when a pass ends; counts its passes in it."""

    def __init__(self, size: int) -> None:
        self.size, self.at, self.passes = size, 0, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        while worker + self.at * workers < self.size:
            value = 1000 * self.passes + worker + self.at * workers
            self.at += 1
            yield value
        self.at, self.passes = 0, self.passes + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.passes = state["at"], state["passes"]


class Drawing(Dataset[list[float]]):
    """Each sample is draws from every generator there is, three of them held by the data set."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held = {"numpy": np.random.default_rng(0), "python": [random.Random(0)]}
        self.torch = torch.Generator().manual_seed(0)
        self.old = np.random.RandomState(0)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> list[float]:
        numpy: Any = self.held["numpy"]
        python: Any = self.held["python"]
        return [
            float(number), random.random(), float(np.random.rand()), float(torch.rand(())), numpy.random(),
            python[0].random(), float(torch.rand((), generator=self.torch)), float(self.old.rand()),
        ]  # fmt: skip


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def epochs(loader: DataLoader[Any], count: int) -> list[list[Any]]:
    return [[plain(batch) for batch in loader] for _ in range(count)]
