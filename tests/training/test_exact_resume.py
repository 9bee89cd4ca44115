"""Law 1: from any checkpoint, the rest of the run is what it was: batches, draws, weights, to the bit.

Each case is run once undisturbed with a checkpoint a step; then it is run anew with the checkpoint of step k alone, for
several k or each, from other random seeds and other initial weights.
"""

from __future__ import annotations

import hashlib
import pathlib
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, RandomSampler

from sgpu import CheckpointPolicy, TrainLoop, seed_everything
from sgpu.data import DataLoader, VolumeDataset
from tests.training.looping import Average, events

Record = tuple[Any, ...]


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Number and noisy features: the noise is drawn when the sample is made."""

    def __init__(self, count: int = 10) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(number), torch.full((4,), float(number)) + torch.rand(4)


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same as an iterable that nobody knows the length of."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        samples = Samples()
        for number in torch.randperm(len(samples)).tolist():
            yield samples[number]


class FromFiles(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Decodes the files of a volume."""

    def __init__(self, files: VolumeDataset) -> None:
        self.files = files

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for path in self.files:
            yield Samples()[int(pathlib.Path(path).stem)]


@dataclass(kw_only=True)
class Case:
    """How a loop is made.

    Attributes:
        loader: made anew for each run, from the folder of a volume.
        steps: that the whole run has.
        resumed_from: None: each of them but the last.
    """

    loader: Callable[[pathlib.Path], Any]
    steps: int
    resumed_from: tuple[int, ...] | None = (1, 3, 5)
    options: dict[str, Any] = field(default_factory=dict)


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(11)


CASES: dict[str, Case] = {
    "no loader": Case(loader=lambda _: None, steps=4, resumed_from=None, options={"max_steps": 4}),
    "no loader, accumulating": Case(
        loader=lambda _: None, steps=4, resumed_from=(1, 3), options={"max_steps": 4, "accumulate": 2}
    ),
    "shuffled": Case(
        loader=lambda _: torch.utils.data.DataLoader(Samples(), batch_size=4, shuffle=True),
        steps=6,
        resumed_from=None,
        options={"epochs": 2},
    ),
    "shuffled by a generator of its own": Case(
        loader=lambda _: torch.utils.data.DataLoader(Samples(), batch_size=4, shuffle=True, generator=own_generator()),
        steps=6,
        options={"epochs": 2},
    ),
    "batches by a sampler with a generator": Case(
        loader=lambda _: torch.utils.data.DataLoader(
            Samples(), batch_sampler=BatchSampler(RandomSampler(Samples(), generator=own_generator()), 4, False)
        ),
        steps=6,
        options={"epochs": 2},
    ),
    "shuffled, two workers that live on": Case(
        loader=lambda _: torch.utils.data.DataLoader(
            Samples(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True
        ),
        steps=6,
        options={"epochs": 2},
    ),
    "distributed sampler": Case(
        loader=lambda _: torch.utils.data.DataLoader(
            Samples(), batch_size=4, sampler=DistributedSampler(Samples(), num_replicas=1, rank=0)
        ),
        steps=9,
        resumed_from=(2, 6, 8),
        options={"epochs": 3},
    ),
    "distributed sampler inside a batch sampler": Case(
        loader=lambda _: torch.utils.data.DataLoader(
            Samples(), batch_sampler=BatchSampler(DistributedSampler(Samples(), num_replicas=1, rank=0), 4, False)
        ),
        steps=6,
        options={"epochs": 2},
    ),
    "no length": Case(
        loader=lambda _: torch.utils.data.DataLoader(Stream(), batch_size=4), steps=6, options={"epochs": 2}
    ),
    "accumulating": Case(
        loader=lambda _: torch.utils.data.DataLoader(Samples(), batch_size=1, shuffle=True),
        steps=6,
        options={"epochs": 2, "accumulate": 4},
    ),
    "ended by max_steps": Case(
        loader=lambda _: torch.utils.data.DataLoader(Samples(), batch_size=4, shuffle=True),
        steps=4,
        resumed_from=(2, 3),
        options={"epochs": 2, "max_steps": 4},
    ),
    "sgpu, a sampler of the user's": Case(
        loader=lambda _: DataLoader(
            Samples(), batch_size=4, num_workers=0, sampler=RandomSampler(Samples(), generator=own_generator())
        ),
        steps=6,
        options={"epochs": 2},
    ),
    "sgpu, map-style": Case(
        loader=lambda _: DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=0, seed=3),
        steps=6,
        options={"epochs": 2},
    ),
    "sgpu, map-style, two workers": Case(
        loader=lambda _: DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=2, seed=3),
        steps=6,
        options={"epochs": 2},
    ),
    "sgpu, volume": Case(
        loader=lambda volume: DataLoader(
            FromFiles(VolumeDataset(volume, shuffle=True, seed=3)), batch_size=4, num_workers=0
        ),
        steps=6,
        resumed_from=None,
        options={"epochs": 2},
    ),
    "sgpu, volume, accumulating": Case(
        loader=lambda volume: DataLoader(
            FromFiles(VolumeDataset(volume, shuffle=True, seed=3)), batch_size=1, num_workers=1
        ),
        steps=6,
        options={"epochs": 2, "accumulate": 4},
    ),
}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run did, from the step that it began at."""

    began_at: int
    records: list[Record]
    digest: str
    counters: dict[str, Any]


def train(case: Case, root: pathlib.Path, volume: pathlib.Path, *, seed: int) -> Trained:
    """Dropout, batch norm, AdamW, a scheduler, an average: one line a batch of all that could differ."""
    seed_everything(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    average = Average(model)
    loader = case.loader(volume)
    loop = TrainLoop(
        model=model, optimizer=optimizer, scheduler=scheduler, loader=loader, extra={"average": average},
        checkpoints=CheckpointPolicy(str(root), every_steps=1, keep_last=100), **case.options,
    )  # fmt: skip
    began_at, records = loop.step, []
    for batch in loop:
        numbers, features = batch if loader is not None else (torch.tensor([batch]), torch.rand(2, 4))
        if len(features) == 1:
            features = features.repeat(2, 1) * torch.tensor([[1.0], [2.0]])  # batch norm needs two
        loss = model(features).square().mean()
        loss.backward()
        if loop.is_update_step:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average.update(model)
        draws = (float(torch.rand(())), float(np.random.rand()))
        records.append((loop.step, loop.epoch, tuple(numbers.tolist()), loss.item(), scheduler.get_last_lr()[0], draws))
    if isinstance(loader, DataLoader):
        loader.close()
    counters = {"step": loop.step, "epoch": loop.epoch, "updates": average.updates}
    if getattr(loader, "persistent_workers", False):
        loader._iterator = None  # ends torch's workers now, and not when the loader happens to be collected
    return Trained(began_at=began_at, records=records, digest=digest(model, optimizer, average), counters=counters)


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer, average: Average) -> str:
    found = hashlib.sha256()
    for name, value in [*model.state_dict().items(), *average.weights.items()]:
        found.update(name.encode() + value.detach().numpy().tobytes())
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in sorted(state.items()):
            found.update(f"{key}/{name}".encode() + value.numpy().tobytes())
    return found.hexdigest()


@pytest.fixture
def volume(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "volume"
    for number in range(10):
        (folder / str(number % 3)).mkdir(parents=True, exist_ok=True)
        (folder / str(number % 3) / f"{number}.txt").write_text(str(number))
    return folder


def check_epochs(case: Case, whole: Trained) -> None:
    """Else the law could hold for a loader that gives the same batches for ever."""
    epochs: dict[int, list[int]] = {}
    for _, epoch, numbers, *_ in whole.records:
        epochs.setdefault(epoch, []).extend(numbers)
    if "max_steps" not in case.options:
        assert all(sorted(numbers) == list(range(10)) for numbers in epochs.values())
        assert len(epochs) == case.options["epochs"]
    assert len({tuple(numbers) for numbers in epochs.values()}) == len(epochs)


@pytest.mark.parametrize("name", CASES)
def test_every_checkpoint_leads_to_the_same_end(
    name: str, tmp_path: pathlib.Path, volume: pathlib.Path, supervised: Callable[[], Any]
) -> None:
    case = CASES[name]
    supervised()
    whole = train(case, tmp_path / "whole", volume, seed=1)
    assert whole.counters["step"] == whole.counters["updates"] == case.steps
    check_epochs(case, whole)
    folders = {int(folder.name.split("-")[1].split(".")[0]): folder for folder in (tmp_path / "whole").glob("step-*")}
    assert sorted(folders) == list(range(1, case.steps + 1))
    for step in case.resumed_from or range(1, case.steps):
        folder = folders[step]
        root = tmp_path / f"from{step}"
        shutil.copytree(folder, root / folder.name)
        supervised()
        rest = train(case, root, volume, seed=100 + step)
        assert rest.began_at == step
        assert rest.records == [record for record in whole.records if record[0] >= step], f"resumed from step {step}"
        assert rest.digest == whole.digest, f"resumed from step {step}"
        assert rest.counters == whole.counters, f"resumed from step {step}"


def test_a_finished_run_says_so_and_trains_nothing(
    tmp_path: pathlib.Path, volume: pathlib.Path, supervised: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES["shuffled"]
    supervised()
    whole = train(case, tmp_path / "root", volume, seed=1)
    draws = torch.rand(3).tolist(), random.random()
    run, _ = supervised()
    again = train(case, tmp_path / "root", volume, seed=2)
    assert (torch.rand(3).tolist(), random.random()) == draws  # what comes after the loop draws the same, too
    assert again.records == []
    assert again.digest == whole.digest
    assert "the run had finished at step 6; nothing is left to train" in capsys.readouterr().out
    (warning,) = events(run, "warning")
    assert "of a training that had finished at step 6" in warning["message"]
    assert "name another folder of checkpoints" in warning["message"]
