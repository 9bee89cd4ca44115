"""Two loaders in one loop, each at its own pace, and a validation loader in between."""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from sgpu import CheckpointPolicy, TrainLoop, seed_everything
from sgpu.data import DataLoader


class Noisy(Dataset[torch.Tensor]):
    """A number and a draw."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(number)), torch.rand(())])


def for_ever(loader: DataLoader[Any]) -> Iterator[Any]:
    """Epoch after epoch, from where the loader stands."""
    while True:
        yield from loader


def train(root: pathlib.Path, seed: int) -> tuple[int, list[Any]]:
    seed_everything(seed)
    first = DataLoader(Noisy(10), 4, shuffle=True, seed=1, num_workers=0)
    second = DataLoader(Noisy(7), 2, shuffle=True, seed=2, num_workers=0)
    validation = DataLoader(Noisy(5), 2, num_workers=0, evaluation=True)
    loop = TrainLoop(
        loader=first, extra={"second": second}, epochs=3,
        checkpoints=CheckpointPolicy(str(root), every_steps=1, keep_last=20),
    )  # fmt: skip
    began, records = loop.step, []
    others = for_ever(second)
    for batch in loop:
        other = next(others)
        if loop.step % 2:
            assert len(torch.cat(list(validation))) == 5
        records.append((loop.step, loop.epoch, batch.tolist(), other.tolist(), float(torch.rand(()))))
    return began, records


def test_each_goes_on_where_it_was(tmp_path: pathlib.Path, supervised: Callable[[], Any]) -> None:
    supervised()
    _, whole = train(tmp_path / "whole", seed=1)
    assert [record[:2] for record in whole] == [(step, step // 3) for step in range(9)]
    assert len({str(record[3]) for record in whole}) == 9, "an epoch of the second differs from the one before"
    for folder in sorted((tmp_path / "whole").glob("step-*"))[:-1]:
        root = tmp_path / f"from-{folder.name}"
        shutil.copytree(folder, root / folder.name)
        supervised()
        began, rest = train(root, seed=100)
        assert rest == whole[began:], f"resumed from step {began}"
        assert 0 < began < 9
