"""The resume law, processes killed at every step, for a kind of each way in which formats are read."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sgpu.data import DataLoader, TableDataset, TarSamples, VolumeDataset
from sgpu.testing.laws.fresh import FreshProcesses
from sgpu.testing.laws.resume import ResumeCase, check_resume_at_every_step
from tests.data.formats import FORMATS, MANY

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here


@pytest.fixture(scope="module")
def processes() -> Iterator[FreshProcesses]:
    with FreshProcesses() as warm:
        yield warm


def numbered(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(number), torch.full((4,), float(number)) + torch.rand(4)


def make(kind: str, folder: pathlib.Path) -> Any:
    if kind == "tars":
        files = VolumeDataset(folder, pattern=TarSamples.pattern, shuffle=True, seed=3)
        return DataLoader(
            TarSamples(files, decode={"cls": int}, transform=lambda sample: numbered(sample["cls"])), 5, num_workers=2
        )
    rows = TableDataset(folder, shuffle=True, seed=3, transform=lambda row: numbered(row["n"]))
    return DataLoader(rows, 5, num_workers=1)


def read(batch: Any) -> tuple[list[int], torch.Tensor]:
    numbers, features = batch
    return numbers.tolist(), features


@pytest.mark.parametrize("kind", ["tars", "delta"])
def test_killed_at_every_step_it_goes_on_as_it_would_have(
    kind: str, tmp_path: pathlib.Path, processes: FreshProcesses
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    FORMATS[kind].make(folder)
    case = ResumeCase(
        make_loader=lambda: make(kind, folder), read=read, each_epoch=MANY, options={"epochs": 1}
    )  # fmt: skip
    check_resume_at_every_step(case, tmp_path / "law", processes)
