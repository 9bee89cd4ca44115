"""The resume law for every kind of pipeline that users have: killed at each step of three epochs."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, get_worker_info

from sgpu.data import DataLoader, VolumeDataset
from sgpu.testing.laws.fresh import FreshProcesses
from sgpu.testing.laws.resume import ResumeCase, check_resume_at_every_step

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here

COUNT = 10
Sample = tuple[torch.Tensor, torch.Tensor]


def sample(number: int) -> Sample:
    """Its number, and features with noise that is drawn when it is made."""
    return torch.tensor(number), torch.full((4,), float(number)) + torch.rand(4)


def read(batch: Any) -> tuple[list[int], torch.Tensor]:
    numbers, features = batch
    return numbers.tolist(), features


class Samples(Dataset[Sample]):
    """Augments with a generator of its own."""

    def __init__(self) -> None:
        self.chance = random.Random(0)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> Sample:
        found, features = sample(number)
        return found, features * self.chance.choice([1.0, 2.0])


class Decoded(IterableDataset[Sample]):
    """One sample a file."""

    def __init__(self, files: VolumeDataset) -> None:
        self.files = files

    def __iter__(self) -> Iterator[Sample]:
        return (sample(int(pathlib.Path(path).stem)) for path in self.files)


class Frames(Decoded):
    """Several samples a file, none of one of them; nested once more."""

    def __iter__(self) -> Iterator[Sample]:
        for number, _ in super().__iter__():
            for part in range(int(number) % 3):
                yield sample(int(number) * 10 + part)


class Pairs(Decoded):
    """One sample of two files."""

    def __iter__(self) -> Iterator[Sample]:
        held = None
        for number, features in super().__iter__():
            if held is None:
                held = features
            else:
                yield number, held + features
                held = None


class Shards(IterableDataset[Sample]):
    """Shards with offsets and a shuffle buffer, with a state of its own, as streaming libraries have it."""

    def __init__(self) -> None:
        self.shards = [range(0, 3), range(3, 7), range(7, 10)]
        self.reset()

    def reset(self) -> None:
        self.shard, self.offset, self.buffer = 0, 0, list[int]()

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        mine = self.shards[worker::workers]
        while self.shard < len(mine) or self.buffer:
            while self.shard < len(mine) and len(self.buffer) < 3:
                self.buffer.append(mine[self.shard][self.offset])
                self.offset += 1
                if self.offset == len(mine[self.shard]):
                    self.shard, self.offset = self.shard + 1, 0
            yield sample(self.buffer.pop(random.randrange(len(self.buffer))))
        self.reset()

    def state_dict(self) -> dict[str, Any]:
        return {"shard": self.shard, "offset": self.offset, "buffer": list(self.buffer)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shard, self.offset, self.buffer = state["shard"], state["offset"], list(state["buffer"])


class Forgetful(Shards):
    """Its state leaves out what waits in the buffer."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "buffer": []})


class Endless(IterableDataset[Sample]):
    """No end, no length, no state."""

    def __iter__(self) -> Iterator[Sample]:
        number = 0
        while True:
            yield sample(number)
            number += 1


def make(kind: str, folder: pathlib.Path) -> Any:
    files = VolumeDataset(folder, shuffle=True, seed=3)
    loaders = {
        "volume": lambda: DataLoader(Decoded(files), 4, num_workers=2),
        "several samples a file": lambda: DataLoader(Frames(files), 4, num_workers=1, one_to_one=False),
        "several samples a file, by files": lambda: DataLoader(Frames(files), 4, num_workers=2, files_at_a_time=1),
        "several files a sample": lambda: DataLoader(Pairs(files), 2, num_workers=0, one_to_one=False),
        "map-style": lambda: DataLoader(Samples(), 4, shuffle=True, num_workers=2, seed=3),
        "distributed sampler": lambda: DataLoader(
            Samples(), 4, sampler=DistributedSampler(Samples(), num_replicas=1, rank=0), num_workers=0
        ),
        "shards": lambda: DataLoader(Shards(), 4, num_workers=0),
        "forgetful": lambda: DataLoader(Forgetful(), 4, num_workers=0),
        "shards, two workers": lambda: DataLoader(Shards(), 4, num_workers=2),
        "endless": lambda: DataLoader(Endless(), 3, num_workers=0),
        "torch's own": lambda: torch.utils.data.DataLoader(Samples(), 4, shuffle=True),
    }
    return loaders[kind]()


ALL = tuple(range(COUNT))
EACH_EPOCH: dict[str, tuple[int, ...] | None] = {
    "volume": ALL,
    "several samples a file": tuple(sorted(n * 10 + part for n in ALL for part in range(n % 3))),
    "several samples a file, by files": tuple(sorted(n * 10 + part for n in ALL for part in range(n % 3))),
    "several files a sample": None,
    "map-style": ALL,
    "distributed sampler": ALL,
    "shards": ALL,
    "shards, two workers": ALL,
    "endless": None,
    "torch's own": ALL,
}


@pytest.fixture(scope="module")
def processes() -> Iterator[FreshProcesses]:
    with FreshProcesses() as warm:
        yield warm


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    volume = tmp_path / "volume"
    volume.mkdir()
    for number in ALL:
        (volume / f"{number}.txt").write_text(str(number))
    return volume


@pytest.mark.parametrize("kind", EACH_EPOCH)
def test_killed_at_every_step_it_goes_on_as_it_would_have(
    kind: str, folder: pathlib.Path, tmp_path: pathlib.Path, processes: FreshProcesses
) -> None:
    case = ResumeCase(
        make_loader=lambda: make(kind, folder), read=read, each_epoch=EACH_EPOCH[kind],
        options={"max_steps": 7} if kind == "endless" else {"epochs": 3},
    )  # fmt: skip
    whole = check_resume_at_every_step(case, tmp_path / "law", processes)
    if kind != "endless":
        orders = {tuple(n for record in whole.records if record[1] == epoch for n in record[2]) for epoch in range(3)}
        assert len(orders) == 3, "each epoch has an order of its own"


def test_the_law_finds_a_pipeline_that_forgets(
    folder: pathlib.Path, tmp_path: pathlib.Path, processes: FreshProcesses
) -> None:
    case = ResumeCase(
        make_loader=lambda: make("forgetful", folder), read=read, each_epoch=ALL, options={"epochs": 1}
    )  # fmt: skip
    with pytest.raises(AssertionError, match="resumed from step 1"):
        check_resume_at_every_step(case, tmp_path / "law", processes)
