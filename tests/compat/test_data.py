"""Reading a volume as the published guides show it: a data set of paths, one around it that decodes, a DataLoader."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import IterableDataset

from sgpu.compat import distributed
from sgpu.compat import runtime as rt
from sgpu.compat.data import Checkpointable, DataLoader, UCVolumeDataset

pytestmark = pytest.mark.usefixtures("without_mlflow")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file by its name

FILES = 23


class Numbers(IterableDataset[tuple[int, str]]):
    """Decodes each file that the volume data set gives: a number, and where the local copy lies."""

    def __init__(self, files: UCVolumeDataset) -> None:
        self.files = files

    def __iter__(self) -> Iterator[tuple[int, str]]:
        for path in self.files:
            yield int(pathlib.Path(path).read_text()), str(path)


@pytest.fixture
def volume(tmp_path: pathlib.Path) -> pathlib.Path:
    """Numbers in text files, some two folders deep."""
    root = tmp_path / "volume"
    for number in range(FILES):
        folder = root / ("a/b", "c", "")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03}.txt").write_text(str(number))
    return root


def read_epochs(volume: str) -> dict[str, list[list[tuple[int, str]]]]:
    """Two epochs as this rank got them, with each kind of loader."""
    rt.init()
    decoded = Numbers(UCVolumeDataset(volume))
    loaders: dict[str, Any] = {
        "defaults": DataLoader(decoded, batch_size=4),
        "no workers": DataLoader(decoded, batch_size=4, num_workers=0),
        "torch's own": torch.utils.data.DataLoader(decoded, batch_size=4, num_workers=2),
    }
    return {
        name: [[(int(n), path) for batch in loader for n, path in zip(*batch, strict=True)] for _ in range(2)]
        for name, loader in loaders.items()
    }


def test_every_file_once_an_epoch_over_ranks_and_workers(volume: pathlib.Path) -> None:
    ranks = distributed(gpus=2)(read_epochs).distributed(str(volume))
    for name in ranks[0]:
        for epoch in range(2):
            numbers = [number for rank in ranks for number, _ in rank[name][epoch]]
            assert sorted(numbers) == list(range(FILES)), (name, epoch)
            assert all(rank[name][epoch] for rank in ranks)
        paths = {pathlib.Path(path) for rank in ranks for epoch in rank[name] for _, path in epoch}
        assert len(paths) == FILES, name
        assert not any(path.is_relative_to(volume) for path in paths), name


def test_the_second_epoch_is_read_from_the_local_copies(volume: pathlib.Path) -> None:
    files = UCVolumeDataset(str(volume))
    with DataLoader(Numbers(files), batch_size=4, num_workers=0) as loader:
        first = [int(number) for numbers, _ in loader for number in numbers]
        downloads = loader.stats().cache_misses
        second = [int(number) for numbers, _ in loader for number in numbers]
        assert loader.stats().cache_misses == downloads == FILES
        assert loader.fetch_seconds >= 0
    assert sorted(first) == sorted(second) == list(range(FILES))


@pytest.mark.parametrize("name", ["SGPU_MIN_FREE_DISK_BYTES", "SGC_FSLAYER_MIN_FREE_DISK_BYTES"])
def test_the_cache_takes_nothing_of_the_space_that_is_to_stay_free(
    name: str, volume: pathlib.Path, home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cached() -> int:
        return sum(path.is_file() for path in (home / "cache").rglob("*.txt"))

    monkeypatch.setenv(name, str(2**60))  # more than any disk has
    loader = DataLoader(Numbers(UCVolumeDataset(str(volume))), batch_size=4, num_workers=0)
    with pytest.warns(UserWarning, match="has no room left .* is read around it"):
        numbers = [int(number) for batch, _ in loader for number in batch]
    assert loader.stats().bypassed >= FILES
    loader.close()
    assert sorted(numbers) == list(range(FILES))
    assert cached() == 0
    monkeypatch.setenv(name, "0")
    assert len([int(number) for number, _ in Numbers(UCVolumeDataset(str(volume)))]) == FILES
    assert cached() == FILES


class Shards:
    """A user's own data set with the two methods, over a list of shards."""

    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = int(state["done"])


def test_a_class_with_the_two_methods_is_checkpointable(volume: pathlib.Path) -> None:
    assert isinstance(Shards(), Checkpointable)
    assert isinstance(UCVolumeDataset(str(volume)), Checkpointable)
    assert isinstance(DataLoader(Numbers(UCVolumeDataset(str(volume))), num_workers=0), Checkpointable)
    assert not isinstance(object(), Checkpointable)
