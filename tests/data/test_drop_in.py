"""The same arguments for torch's DataLoader and ours: the same batches, in the same order, of the same types."""

from __future__ import annotations

import multiprocessing
from collections import namedtuple
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)  # fmt: skip

from sgpu.data import DataLoader
from tests.data.conftest import being
from tests.data.samples import Numbers, Stateful, Uneven

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # few CPUs are no fault here
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),  # nor is no GPU
]

SIZE = 11
Pair = namedtuple("Pair", ["number", "rest"])
Make = Callable[[], dict[str, Any]]


class Nested(Numbers):
    """Samples of every kind that torch's collate knows."""

    tag = 0

    def __getitem__(self, number: int) -> Any:
        return {
            "array": np.full(2, number), "tensor": torch.tensor([number]), "text": str(number), "float": number / 2,
            "pair": Pair(number, [number, (self.tag, b"x")]),
        }  # fmt: skip


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def pairs() -> TensorDataset:
    return TensorDataset(torch.arange(SIZE), torch.arange(SIZE) * 2.0)


def tag(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.tag = worker + 10


def second(items: list[Any]) -> Any:
    return [item[1] for item in items]


CASES: dict[str, Make] = {
    "sizes": lambda: {"dataset": pairs(), "batch_size": 4},
    "drop_last": lambda: {"dataset": pairs(), "batch_size": 4, "drop_last": True},
    "no batches": lambda: {"dataset": pairs(), "batch_size": None},
    "no batches, a sampler": lambda: {"dataset": pairs(), "batch_size": None, "sampler": [5, 1]},
    "nested samples": lambda: {"dataset": Nested(SIZE), "batch_size": 4},
    "a subset": lambda: {"dataset": Subset(pairs(), [7, 1, 4]), "batch_size": 2},
    "two sets": lambda: {"dataset": ConcatDataset([Numbers(3), Numbers(4)]), "batch_size": 5},
    "a collate_fn": lambda: {"dataset": pairs(), "batch_size": 4, "collate_fn": second},
    "pinned": lambda: {"dataset": Nested(SIZE), "batch_size": 4, "pin_memory": True},
    "a list for a sampler": lambda: {"dataset": pairs(), "batch_size": 2, "sampler": [9, 9, 0]},
    "batches": lambda: {"dataset": pairs(), "batch_sampler": [[1, 2, 3], [4], [10, 0]]},
    "an iterable": lambda: {"dataset": Uneven(SIZE), "batch_size": 2},
    "an iterable, no batches": lambda: {"dataset": Uneven(SIZE), "batch_size": None},
    "an iterable, drop_last": lambda: {"dataset": Uneven(SIZE), "batch_size": 3, "drop_last": True},
    "an iterable with a state": lambda: {"dataset": Stateful(SIZE), "batch_size": 2},
}  # fmt: skip

# these say something of workers only
OF_WORKERS: dict[str, Make] = {
    "worker_init_fn": lambda: {"dataset": Nested(SIZE), "batch_size": 4, "worker_init_fn": tag},
    "a context by name": lambda: {"dataset": pairs(), "batch_size": 4, "multiprocessing_context": "fork"},
    "a context": lambda: {
        "dataset": pairs(), "batch_size": 4, "multiprocessing_context": multiprocessing.get_context("fork"),
    },
    "ahead and in time": lambda: {"dataset": pairs(), "batch_size": 2, "prefetch_factor": 4, "timeout": 60},
    "workers that end": lambda: {"dataset": pairs(), "batch_size": 4, "persistent_workers": False},
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "workers"),
    [pytest.param(make, workers, id=f"{name}-{workers}") for name, make in CASES.items() for workers in (0, 2)]
    + [pytest.param(make, 2, id=name) for name, make in OF_WORKERS.items()],
)
def test_batches_are_torchs(make: Make, workers: int) -> None:
    theirs = torch.utils.data.DataLoader(**{"persistent_workers": workers > 0, **make()}, num_workers=workers)
    with DataLoader(**make(), num_workers=workers) as mine:
        for epoch in range(2):
            wanted = list(theirs)
            assert wanted, "it would prove nothing"
            found = list(mine)
            assert len(found) == len(wanted)
            for one, other in zip(found, wanted, strict=True):
                assert_same(one, other)
            assert mine.epoch == epoch + 1
        try:
            length: int | None = len(theirs)
        except TypeError:
            length = None
        if length is not None:
            assert len(mine) == length


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert_same(value, other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("workers", [0, 2])
def test_a_distributed_sampler_is_told_its_epochs_by_the_user(workers: int) -> None:
    with being(1, 2):
        mine, theirs = (DistributedSampler(range(SIZE), 2, 1, shuffle=True, seed=5) for _ in range(2))
        data: Dataset[Any] = pairs()
        reference = torch.utils.data.DataLoader(data, 2, sampler=theirs)
        seen = []
        with DataLoader(data, 2, sampler=mine, num_workers=workers) as loader:
            for epoch in (0, 1, 7):
                mine.set_epoch(epoch)
                theirs.set_epoch(epoch)
                seen.append([batch[0].tolist() for batch in loader])
                assert seen[-1] == [batch[0].tolist() for batch in reference]
        assert seen[0] != seen[1] != seen[2]


RANDOM: dict[str, tuple[Make, bool]] = {
    "shuffle": (lambda: {"batch_size": 4, "shuffle": True, "generator": seeded()}, True),
    "a random sampler": (lambda: {"batch_size": 4, "sampler": RandomSampler(range(SIZE), generator=seeded())}, True),
    "with replacement": (
        lambda: {
            "batch_size": 4,
            "sampler": RandomSampler(range(SIZE), replacement=True, num_samples=20, generator=seeded()),
        },
        False,
    ),
    "weights": (
        lambda: {"sampler": WeightedRandomSampler(range(SIZE), 17, generator=seeded()), "drop_last": True}, False,
    ),
    "some": (lambda: {"sampler": SubsetRandomSampler(range(2, 7), generator=seeded())}, True),
    "random batches": (
        lambda: {"batch_sampler": BatchSampler(RandomSampler(range(SIZE), generator=seeded()), 3, drop_last=False)},
        True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "once"), RANDOM.values(), ids=RANDOM)
def test_a_random_order_is_ours_and_holds_what_torchs_holds(make: Make, once: bool) -> None:
    """Each epoch's is a function of seed and epoch, so that it can be begun anywhere; torch's is what came before."""
    theirs = [batch[0].tolist() for batch in torch.utils.data.DataLoader(pairs(), **make())]
    epochs: list[list[list[int]]] = []
    with DataLoader(pairs(), **make(), num_workers=2) as loader, DataLoader(pairs(), **make(), num_workers=0) as same:
        for epoch in (0, 1, 0):
            loader.set_epoch(epoch)
            same.set_epoch(epoch)
            epochs.append([batch[0].tolist() for batch in loader])
            assert epochs[-1] == [batch[0].tolist() for batch in same]
    assert epochs[0] == epochs[2] != epochs[1]
    for batches in epochs:
        assert [len(batch) for batch in batches] == [len(batch) for batch in theirs]
        assert not once or sorted(chain(*batches)) == sorted(chain(*theirs))
