"""What a user's own code raises says which sample or file it had in hand."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset

from sgpu.contract.errors import FetchError
from sgpu.data import DataLoader, VolumeDataset
from tests.data.conftest import MakeVolume
from tests.data.samples import Wrapped

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions take notes from Python 3.11 on")


class Halving(Wrapped):
    """Cannot make a sample of file 5."""

    def __iter__(self) -> Iterator[int]:
        for number in super().__iter__():
            yield 10 // (number - 5)


class Divided(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        return 10 // (number - 5)


def raised_by(loader: DataLoader) -> str:
    with loader, pytest.raises(ZeroDivisionError) as caught:
        list(loader)
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("more", [{}, {"files_at_a_time": 1}], ids=["one to one", "blocks"])
def test_the_file_is_named(workers: int, more: dict[str, Any], make_volume: MakeVolume) -> None:
    data = Halving(VolumeDataset(make_volume(8)))
    told = raised_by(DataLoader(data, 2, num_workers=workers, **more))
    assert "It was raised while the sample of class2/0005.bin of volume /" in told


@pytest.mark.parametrize("workers", [0, 1])
def test_the_number_of_a_sample_is_named(workers: int) -> None:
    told = raised_by(DataLoader(Divided(), 2, shuffle=True, num_workers=workers))
    assert "It was raised while sample 5 of Divided was made" in told


def test_what_names_its_file_itself_is_left_as_it_is(make_volume: MakeVolume) -> None:
    volume = make_volume(3)
    data = VolumeDataset(volume)
    (volume / "class1" / "0001.bin").unlink()
    with DataLoader(Wrapped(data), 1, num_workers=0) as loader, pytest.raises(FetchError, match="0001") as caught:
        list(loader)
    assert not hasattr(caught.value, "__notes__")
