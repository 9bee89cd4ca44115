"""Which epoch a loader is in, who may say so, and one iteration at a time."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from sgpu.contract.errors import DataError
from sgpu.data import DataLoader, VolumeDataset
from tests.data.conftest import MakeVolume
from tests.data.samples import Numbers, Wrapped, epochs

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here


def test_set_epoch(make_volume: MakeVolume) -> None:
    root = make_volume(30)

    def make() -> DataLoader[Any]:
        return DataLoader(Wrapped(VolumeDataset(root, shuffle=True)), 4, num_workers=0)

    whole = epochs(make(), 4)
    loader = make()
    loader.set_epoch(2)
    assert epochs(loader, 2) == whole[2:]
    loader.set_epoch(1)
    assert epochs(loader, 1) == [whole[1]]
    iterator = iter(loader)
    next(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(2)  # the idiom: told at the top of each epoch, also of the resumed one
    assert epochs(resumed, 1) == [whole[2][1:]]


def test_the_epoch_that_a_volume_was_told_counts(make_volume: MakeVolume) -> None:
    root = make_volume(30)
    whole = epochs(DataLoader(VolumeDataset(root, shuffle=True), 4, num_workers=0), 3)
    volume = VolumeDataset(root, shuffle=True)
    with DataLoader(volume, 4, num_workers=2) as loader:
        for epoch in (2, 0, 1):
            volume.set_epoch(epoch)
            assert epochs(loader, 1) == [whole[epoch]]


def test_one_iterator_at_a_time() -> None:
    loader: DataLoader[Any] = DataLoader(Numbers(25), 4, shuffle=True, num_workers=0)
    first, second = iter(loader), iter(loader)
    next(second)
    with pytest.raises(DataError, match="iterated anew"):
        next(first)


def test_a_seed_of_the_run_orders_map_style_data(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = [epochs(DataLoader(Numbers(40), 8, shuffle=True, seed=seed, num_workers=0), 1) for seed in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]
    generator = torch.Generator().manual_seed(1)
    assert epochs(DataLoader(Numbers(40), 8, shuffle=True, generator=generator, num_workers=0), 1) == orders[0]
