"""Volume datasets by themselves and under plain torch."""

from __future__ import annotations

import copy
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data

import sgpu.data
from sgpu.contract.errors import InputError, PositionError
from sgpu.data import Checkpointable, DataLoader, UCVolumeDataset, VolumeDataset, VolumeFiles
from tests.data.conftest import MakeVolume, being
from tests.data.samples import Wrapped

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here


def names(paths: Any) -> list[int]:
    return [int(pathlib.Path(path).stem) for path in paths]


@pytest.mark.parametrize("nested", [False, True])
def test_plain_torch_loaders_split_files_over_ranks_and_workers(nested: bool, make_volume: MakeVolume) -> None:
    root = make_volume(23)
    for world, workers in ((1, 0), (1, 1), (2, 2), (3, 0), (3, 3)):
        found = []
        for rank in range(world):
            with being(rank, world):
                volume = VolumeDataset(root, shuffle=True, seed=2)
                dataset: Any = Wrapped(volume) if nested else volume
                loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=workers)
                got = list(loader)
                found += [int(number) for number in got] if nested else names(got)
                del loader
        assert sorted(found) == list(range(23)), (world, workers)


def test_set_epoch_reaches_workers_that_live_on(make_volume: MakeVolume) -> None:
    volume = VolumeDataset(make_volume(40), shuffle=True)
    loader = torch.utils.data.DataLoader(volume, batch_size=None, num_workers=1, persistent_workers=True)
    orders = []
    for epoch in range(3):
        volume.set_epoch(epoch)
        orders.append(names(loader))
    assert len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(40)) for order in orders)
    del loader


def test_iterated_directly_each_pass_is_the_next_epoch(make_volume: MakeVolume) -> None:
    root = make_volume(20)
    volume = VolumeDataset(root, shuffle=True, seed=1)
    whole = [names(volume) for _ in range(3)]
    assert len({tuple(order) for order in whole}) == 3
    again = VolumeDataset(root, shuffle=True, seed=1)
    next(iter(again))
    assert names(again) == whole[0]
    for stop in (0, 1, 7, 19):
        running = VolumeDataset(root, shuffle=True, seed=1)
        iterator = iter(running)
        for _ in range(stop):
            next(iterator)
        resumed = VolumeDataset(root, shuffle=True, seed=1)
        resumed.load_state_dict(running.state_dict())
        assert names(resumed) == whole[0][stop:]
        assert names(resumed) == whole[1]
    list(again)
    resumed.load_state_dict(again.state_dict())
    assert names(resumed) == whole[2]


def test_a_state_of_another_stream_or_order_is_refused(make_volume: MakeVolume) -> None:
    root = make_volume(20)
    with being(1, 2):
        volume = VolumeDataset(root)
        next(iter(volume))
        state = volume.state_dict()
    other = VolumeDataset(root)
    other.load_state_dict(state)
    with pytest.raises(PositionError, match=r"stream 1 of 2 .* this is 0 of 1"):
        list(other)
    with pytest.raises(PositionError, match="seed 0 and shuffle False; this data set has seed 4"):
        VolumeDataset(root, seed=4).load_state_dict(state)
    for bad in ({}, None, "x"):
        with pytest.raises(PositionError, match=r"expected a state of VolumeDataset"):
            other.load_state_dict(bad)  # type: ignore[arg-type]


def test_length_names_and_protocol(make_volume: MakeVolume) -> None:
    root = make_volume(7)
    volume = UCVolumeDataset(str(root))
    assert len(volume) == 7
    assert isinstance(volume, Checkpointable)
    assert UCVolumeDataset is VolumeDataset
    first = next(iter(volume))
    assert volume.relative_path(first) == "class0/0000.bin"
    assert first.endswith("/class0/0000.bin")
    assert pathlib.Path(first).parent != root / "class0"
    with pytest.raises(InputError, match="is no file of volume"):
        volume.relative_path("/etc/passwd")
    assert set(sgpu.data.__all__) >= {"VolumeWriter", "UCVolumeReader"}
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        sgpu.data.Nothing  # noqa: B018


def test_writers_and_readers_are_offered_here_too() -> None:
    checkpoint = pytest.importorskip("sgpu.checkpoint", reason="sgpu.checkpoint is not there yet")
    for name in ("VolumeWriter", "VolumeReader"):
        assert getattr(sgpu.data, name) is getattr(sgpu.data, f"UC{name}") is getattr(checkpoint, name)


def test_files_by_number(make_volume: MakeVolume) -> None:
    files = VolumeFiles(make_volume(8), pattern="class1/*")
    assert len(files) == 3
    assert [files.relative(number) for number in range(3)] == ["class1/0001.bin", "class1/0004.bin", "class1/0007.bin"]
    assert names(files[number] for number in range(-1, 2)) == [7, 1, 4]
    with pytest.raises(IndexError):
        files[3]
    with pytest.raises(IndexError):
        files.relative(-1)
    with pytest.raises(InputError, match=r"found \[2\]\. For files by number use sgpu\.data\.VolumeFiles\('/"):
        VolumeDataset(make_volume(3))[2]


def test_copies_and_pickles_read_the_same_listing(make_volume: MakeVolume) -> None:
    root = make_volume(6)
    volume = VolumeDataset(root, shuffle=True, seed=3)
    (root / "late.bin").write_text("late")
    for other in (pickle.loads(pickle.dumps(volume)), copy.deepcopy(volume)):
        assert names(other) == names(VolumeDataset.__iter__(pickle.loads(pickle.dumps(volume))))
        assert len(other) == 6


def test_a_pickle_without_its_listing_lists_again_and_must_find_the_same(make_volume: MakeVolume) -> None:
    root = make_volume(6)
    pickled = pickle.dumps(VolumeDataset(root))
    listing = VolumeDataset(root).source.listing.file
    listing.unlink()
    assert len(pickle.loads(pickled)) == 6
    listing.unlink()
    (root / "late.bin").write_text("late")
    with pytest.raises(sgpu.contract.errors.ListingChangedError, match="has other files here"):
        pickle.loads(pickled)


def test_a_subclass_that_decodes_is_one_to_one(make_volume: MakeVolume) -> None:
    class Images(VolumeDataset):
        def __iter__(self) -> Any:
            return iter(names(super().__iter__()))

    root = make_volume(20)
    loader: DataLoader[Any] = DataLoader(Images(root, shuffle=True), 4, num_workers=0)
    assert loader.state_dict()["kind"] == "planned"
    assert sorted(int(number) for batch in loader for number in batch) == list(range(20))


class Peeking(Wrapped):
    """Begins its volume twice."""

    def __iter__(self) -> Iterator[int]:
        yield int(pathlib.Path(next(iter(self.inside["volume"][0]))).stem)
        yield from super().__iter__()


def test_a_data_set_may_look_at_a_path_before_it_goes_over_all(make_volume: MakeVolume) -> None:
    root = make_volume(10)
    with DataLoader(Peeking(VolumeDataset(root)), 4, num_workers=0) as loader:
        assert [number for batch in loader for number in batch.tolist()] == names(VolumeDataset(root))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [({"pattern": 3}, "pattern must be text"), ({"shuffle": "False"}, "shuffle must be True or False; found 'False'")],
)
def test_an_argument_of_another_type_is_refused(make_volume: MakeVolume, arguments: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        VolumeDataset(make_volume(2), **arguments)


@pytest.mark.parametrize("workers", [1.5, "2"])
def test_a_number_of_workers_that_is_none_is_refused(make_volume: MakeVolume, workers: Any) -> None:
    with pytest.raises(InputError, match="num_workers must be a whole number, 0 or more, or None; found "):
        DataLoader(VolumeDataset(make_volume(2)), num_workers=workers)


def test_a_volume_shows_what_it_reads(make_volume: MakeVolume) -> None:
    root = make_volume(3)
    assert repr(VolumeDataset(root)) == f"VolumeDataset({str(root)!r}, pattern='**/*'): 3 files"
