"""Prefetching a volume: all of it, in order, beside a training, ended with its handle; and what it says."""

from __future__ import annotations

import os
import pathlib
import re
import signal
from typing import Any

import fsspec
import pytest

from sgpu.contract.errors import FetchError
from sgpu.data import DataLoader, VolumeDataset
from sgpu.data.fetching.warming import Progress, Warming, wanted
from sgpu.data.source import Source, SourceOptions
from tests.data.conftest import MakeVolume


def here(home: pathlib.Path) -> int:
    return len(list((home / "cache").rglob("*.bin")))


def test_all_files_are_here_once_it_returns(
    make_volume: MakeVolume, home: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    volume = VolumeDataset(make_volume(30), shuffle=True)
    found = volume.prefetch().progress
    assert (found.files, found.done, found.done_bytes, found.without_room) == (30, 30, 3000, 0)
    assert here(home) == 30
    assert volume.source.counts().downloads == 30
    drawn = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\[#{20}\] 30 of 30 files, 3\.0 kB of 3\.0 kB, [\d.]+ \w+/s", drawn[-1])
    assert len(list(volume)) == 30
    assert volume.source.counts().downloads == 30
    volume.prefetch(progress=False)
    assert capsys.readouterr().err == ""


def test_it_goes_on_beside_a_training_and_ends_with_its_handle(make_volume: MakeVolume, home: pathlib.Path) -> None:
    volume = VolumeDataset(make_volume(200), shuffle=True)
    warming = volume.prefetch(wait=False, progress=False)
    with DataLoader(volume, 8, num_workers=0) as loader:
        assert sum(len(batch) for batch in loader) == 200
        assert warming.wait(60).is_done
        assert loader.stats().cache_misses == 200, "nothing came twice"
    other = VolumeDataset(make_volume(300, name="other")).prefetch(wait=False, progress=False)
    process = other._process
    assert process is not None
    del other
    assert process.wait(30) is not None


def test_one_that_is_killed_or_cancelled_says_so(make_volume: MakeVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGPU_FAILPOINT", "data.copy=hang")
    volume = VolumeDataset(make_volume(5))
    warming = volume.prefetch(wait=False, progress=False)
    with pytest.raises(TimeoutError, match="0 of 5 files"):
        warming.wait(0.05)
    assert warming._process is not None
    os.kill(warming._process.pid, signal.SIGKILL)
    with pytest.raises(FetchError, match="was ended early"):
        warming.wait(60)
    cancelled = volume.prefetch(wait=False, progress=False)
    cancelled.cancel()
    assert not cancelled.progress.is_done


def test_what_cannot_be_read_is_told_and_the_rest_is_here(make_volume: MakeVolume, home: pathlib.Path) -> None:
    root = make_volume(6)
    volume = VolumeDataset(root)
    (root / "class1" / "0001.bin").unlink()
    with pytest.raises(FetchError, match=r"1 of 6 files of .* could not be prefetched; the first: .*class1/0001\.bin"):
        volume.prefetch(progress=False)
    assert here(home) == 5


def test_what_finds_no_room_is_counted(make_volume: MakeVolume, home: pathlib.Path) -> None:
    found = VolumeDataset(make_volume(10), cache_limit_bytes=450).prefetch(progress=False).progress
    assert (found.done, found.without_room, found.done_bytes) == (10, 6, 400)
    assert "no room for 6" in str(found)
    assert here(home) == 4


def test_what_is_wanted_first_comes_first(make_volume: MakeVolume) -> None:
    source = Source(SourceOptions(url=str(make_volume(10))))
    assert wanted(source, seed=0, epoch=0, shuffle=False, first=0.0).tolist() == list(range(10))
    assert wanted(source, seed=0, epoch=0, shuffle=False, first=0.5).tolist() == [5, 6, 7, 8, 9, 0, 1, 2, 3, 4]
    one, other = (wanted(source, seed=0, epoch=epoch, shuffle=True, first=0.0).tolist() for epoch in (0, 1))
    assert one != other


def test_what_lives_in_this_process_only_is_brought_by_it() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/warm/{number}": b"x" * 10 for number in range(8)})
    warming: Warming = VolumeDataset("memory://warm").prefetch(progress=False)
    assert warming.wait().done_bytes == 80
    warming.cancel()
    memory.rm("/warm", recursive=True)


def test_a_bar_is_a_line() -> None:
    made: dict[str, Any] = {"files": 2000, "size_bytes": 200_000_000}
    half = Progress(**made, done=1000, done_bytes=100_000_000, seconds=2.0, failed=3)
    assert str(half) == "[##########..........] 1,000 of 2,000 files, 100.0 MB of 200.0 MB, 50.0 MB/s, 3 failed"
