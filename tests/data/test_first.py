"""What a process brings before a fetcher is there, and what its workers share of its garbage."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from sgpu.data import DataLoader, VolumeDataset
from sgpu.data.fetching import ahead, first
from sgpu.data.fetching.first import FirstFiles
from sgpu.data.source import Source, SourceOptions
from sgpu.data.volumes.entry import Entry
from sgpu.data.volumes.folder import FolderVolume
from tests.data.conftest import MakeVolume, eventually
from tests.data.samples import Wrapped


def here(source: Source) -> list[int]:
    return [number for number in range(len(source)) if source.cache.has(number)]


@pytest.fixture
def no_fetcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "worthwhile", lambda *_: False)


@pytest.mark.parametrize("workers", [0, 2])
def test_more_than_a_batch_is_on_its_way_before_there_is_a_fetcher(
    workers: int, make_volume: MakeVolume, no_fetcher: None
) -> None:
    volume = VolumeDataset(make_volume(100), shuffle=True)
    with DataLoader(Wrapped(volume), 4, num_workers=workers) as loader:
        iterator = iter(loader)
        next(iterator)
        eventually(lambda: len(here(volume.source)) == 100)
        assert sorted(n for batch in iterator for n in batch.tolist()) != []
        assert loader.stats().downloaded_bytes == 10_000  # each once


def test_it_stays_within_its_bounds_and_once_a_process(
    make_volume: MakeVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first, "_FILES", 20)
    root = make_volume(60)
    source = Source(SourceOptions(url=str(root)))
    FirstFiles(source, range(60), at_least=4, readers=2)
    eventually(lambda: here(source) == list(range(10)))
    FirstFiles(source, range(30, 60), at_least=4, readers=2)
    other = Source(SourceOptions(url=str(root)))
    monkeypatch.setattr(first, "_SIZE_BYTES", 0)
    FirstFiles(other, range(30, 60), at_least=3, readers=2)
    eventually(lambda: here(source) == [*range(10), 30, 31, 32])
    late = Source(SourceOptions(url=str(root)))
    FirstFiles(late, range(40, 60), at_least=0, readers=2)
    assert here(source) == [*range(10), 30, 31, 32]


def test_a_quicker_fetcher_gets_most(make_volume: MakeVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(SourceOptions(url=str(make_volume(60))))
    monkeypatch.setattr(first, "_FILES_UNTIL_QUICKER", 20)
    monkeypatch.setattr(first, "others_are_quicker", lambda volume: volume is source.volume)
    started = FirstFiles(source, range(60), at_least=4, readers=1)
    assert started._lanes.drain(60)
    assert here(source) == list(range(20))


def test_what_is_not_on_its_way_when_it_stops_does_not_come(
    make_volume: MakeVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, begun = FolderVolume.copy, threading.Event()

    def slow(self: FolderVolume, entry: Entry, descriptor: int) -> None:
        begun.set()
        going.wait(60)
        copy(self, entry, descriptor)

    going = threading.Event()
    monkeypatch.setattr(FolderVolume, "copy", slow)
    source = Source(SourceOptions(url=str(make_volume(400))))
    started = FirstFiles(source, range(400), at_least=4, readers=1)
    assert begun.wait(60)
    started.stop()
    going.set()
    assert started._lanes.drain(60)
    assert 0 < len(here(source)) < 400


class Frozen(Wrapped):
    def __iter__(self) -> Any:
        return ((number, gc.get_freeze_count()) for number in super().__iter__())


def test_workers_leave_what_their_parent_made_out_of_their_collections(make_volume: MakeVolume) -> None:
    volume = VolumeDataset(make_volume(8))
    with DataLoader(Frozen(volume), 4, num_workers=1, collate_fn=list) as loader:
        counts = [count for batch in loader for _, count in batch]
    assert min(counts) > 10_000
    assert gc.get_freeze_count() == 0
