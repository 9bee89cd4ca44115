"""An order is computed by place: a trillion samples cost no memory, and a resume reads nothing twice."""

from __future__ import annotations

import pathlib
import tracemalloc
from typing import Any

import pytest
from torch.utils.data import Dataset, RandomSampler

from sgpu.data import DataLoader, VolumeDataset
from tests.data.conftest import MakeVolume, being
from tests.data.samples import Stateful, Wrapped

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here

COUNT = 10**12


class Seen(Dataset[int]):
    """Remembers which samples were made."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count
        self.made: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> int:
        self.made.append(number)
        return number


@pytest.mark.parametrize("workers", [0, 2])
def test_a_trillion_samples_cost_no_memory(workers: int) -> None:
    def batches(state: Any = None) -> tuple[list[list[int]], Any]:
        with DataLoader(Seen(), 4, shuffle=True, seed=3, num_workers=workers) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found = [batch.tolist() for _, batch in zip(range(3), loader, strict=False)]
            return found, loader.state_dict()

    batches()
    tracemalloc.start()
    try:
        first, state = batches()
        late, _ = batches({**state, "cursor": COUNT // 2})
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20
    numbers = [number for batch in first + late for number in batch]
    assert len(set(numbers)) == 24
    assert max(numbers) > COUNT // 4
    with being(2, 3):
        assert len(DataLoader(Seen(), 4, num_workers=0)) == -(-COUNT // 12)


def test_a_resume_makes_only_what_is_new() -> None:
    whole = Seen(1000)
    order = [batch.tolist() for batch in DataLoader(whole, 4, shuffle=True, seed=3, num_workers=0)]
    for position, make in (
        ("cursor", lambda data: DataLoader(data, 4, shuffle=True, seed=3, num_workers=0)),
        ("batches", lambda data: DataLoader(data, 4, sampler=RandomSampler(data), seed=3, num_workers=0)),
    ):
        before = make(Seen(1000))
        iterator = iter(before)
        for _ in range(200):
            next(iterator)
        data = Seen(1000)
        loader = make(data)
        loader.load_state_dict(before.state_dict())
        batch = next(iter(loader))
        assert data.made == batch.tolist(), position
        if position == "cursor":
            assert batch.tolist() == order[200]


def test_a_resume_fetches_only_files_that_are_new(make_volume: MakeVolume, tmp_path: pathlib.Path) -> None:
    root = make_volume(60)

    def make(cache: str) -> DataLoader[Any]:
        volume = VolumeDataset(root, shuffle=True, seed=3, cache_dir=tmp_path / cache)
        return DataLoader(Wrapped(volume), 4, num_workers=0)

    with make("first") as before:
        iterator = iter(before)
        for _ in range(10):
            next(iterator)
        state = before.state_dict()
    with make("second") as after:
        after.load_state_dict(state)
        assert sum(len(batch) for batch in after) == 20
        assert after.stats().cache_misses == 20


def test_a_data_set_with_a_state_of_its_own_is_not_read_again() -> None:
    class Counting(Stateful):
        given = 0

        def __iter__(self) -> Any:
            for value in super().__iter__():
                self.given += 1
                yield value

    before: DataLoader[Any] = DataLoader(Counting(1000), 4, num_workers=0)
    iterator = iter(before)
    for _ in range(200):
        next(iterator)
    data = Counting(1000)
    loader: DataLoader[Any] = DataLoader(data, 4, num_workers=0)
    loader.load_state_dict(before.state_dict())
    next(iter(loader))
    assert data.given <= 4
