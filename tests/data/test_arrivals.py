"""Small files that many threads read and one of them stores: all whole, each told once, one's trouble its own."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from sgpu.data.caching import arrivals
from sgpu.data.caching.arrivals import Arrivals, Outcome
from sgpu.data.caching.room import STATE, Part
from sgpu.data.source import Source, SourceOptions
from tests.data.conftest import MakeVolume

HERE, NO_ROOM = Outcome(True), Outcome(False)
FILES = 60


def opened(root: pathlib.Path, **more: int) -> Source:
    source = Source(SourceOptions(url=str(root), min_free_disk_bytes=0, **more))
    source.cache.room.used_bytes()  # from here on it can be guessed whether there is plenty
    return source


def brought(source: Source, numbers: range = range(FILES), threads: int = 16) -> tuple[dict[int, Outcome], int]:
    """What was told of each file, and the bytes that came."""
    told: dict[int, Outcome] = {}

    def tell(number: int, outcome: Outcome) -> None:
        assert number not in told
        told[number] = outcome

    bringing = Arrivals(source.cache, tell, tries=1)
    with ThreadPoolExecutor(threads) as pool:
        size = sum(pool.map(bringing.bring, numbers))
    assert bringing._storing.acquire(blocking=False)
    return told, size


def check(source: Source, root: pathlib.Path, numbers: range = range(FILES)) -> None:
    for number in numbers:
        path = pathlib.Path(source.cache.local(number))
        assert path.read_bytes() == (root / source.listing.path(number)).read_bytes()
        assert source.cache.has(number)
    assert list((source.root / STATE / "parts").iterdir()) == []


def test_all_files_come_and_are_counted_once(make_volume: MakeVolume) -> None:
    root = make_volume(FILES)
    source = opened(root)
    assert brought(source) == (dict.fromkeys(range(FILES), HERE), 100 * FILES)
    check(source, root)
    assert source.cache.room.used_bytes() == source.cache.room.recount() == 100 * FILES
    assert (source.counts().downloads, source.counts().downloaded_bytes) == (FILES, 100 * FILES)
    assert brought(source) == (dict.fromkeys(range(FILES), HERE), 0)
    assert source.counts().downloads == FILES
    book = source.cache.sums.load()
    assert len(book) == FILES


def test_two_processes_share_the_work(make_volume: MakeVolume) -> None:
    root = make_volume(FILES)
    ours, theirs = opened(root), opened(root)  # each with locks of its own, as in two processes
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(brought, (ours, theirs)))
    assert [found[0] for found in told] == [dict.fromkeys(range(FILES), HERE)] * 2
    assert sum(size for _, size in told) == 100 * FILES
    assert ours.counts().downloads + theirs.counts().downloads == FILES
    check(ours, root)


def test_what_cannot_be_read_or_written_harms_no_other(
    make_volume: MakeVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_volume(FILES)
    source = opened(root)
    (root / source.listing.path(7)).unlink()
    wrote = arrivals._write

    def write(came: arrivals._Came, part: Part) -> None:
        wrote(came, part)
        if came.number == 9:
            raise OSError(5, "the cache's disk is ill")
        if came.number == 11:
            raise OSError(28, "full")

    monkeypatch.setattr(arrivals, "_write", write)
    told, _ = brought(source)
    assert {number for number, outcome in told.items() if not outcome.here} == {7, 9, 11}
    assert source.listing.path(7) in told[7].problem
    assert "the cache's disk is ill" in told[9].problem
    assert told[11] == NO_ROOM
    monkeypatch.undo()
    assert source.cache.room.used_bytes() == source.cache.room.recount() == 100 * (FILES - 3)
    assert brought(source, range(9, 12))[0] == dict.fromkeys(range(9, 12), HERE), "their locks are free"
    check(source, root, range(8, FILES))


def test_trouble_of_the_whole_cache_is_told_of_each(make_volume: MakeVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(make_volume(FILES))

    def refuse(sizes: list[int]) -> list[Part | None]:
        raise OSError(30, "read-only")

    monkeypatch.setattr(source.cache.room, "reserve_all", refuse)
    told, _ = brought(source)
    assert len(told) == FILES
    assert all("read-only" in outcome.problem for outcome in told.values())
    monkeypatch.undo()
    assert set(brought(source)[0].values()) == {HERE}


def test_trouble_with_the_checksums_gives_all_room_back(
    make_volume: MakeVolume, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = opened(make_volume(FILES))

    def refuse(found: object) -> None:
        raise OSError(28, "full")

    monkeypatch.setattr(source.cache.sums, "add_all", refuse)
    told, _ = brought(source)
    assert all("full" in outcome.problem for outcome in told.values())
    assert list((source.root / STATE / "parts").iterdir()) == []
    assert source.cache.room.used_bytes() == 0
    monkeypatch.undo()
    assert set(brought(source)[0].values()) == {HERE}


def test_a_cache_that_is_nearly_full_takes_what_fits(make_volume: MakeVolume) -> None:
    source = opened(make_volume(FILES), cache_limit_bytes=1_000)
    told, size = brought(source)
    assert size == 1_000
    assert sorted(told.values()) == [NO_ROOM] * (FILES - 10) + [HERE] * 10
    assert source.cache.room.used_bytes() == source.cache.room.recount() == 1_000


def test_room_that_another_took_meanwhile_is_no_error(make_volume: MakeVolume, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened(make_volume(FILES), cache_limit_bytes=1_000)
    monkeypatch.setattr(source.cache.room, "has_plenty", lambda size: True)
    told, _ = brought(source)
    assert sorted(told.values()) == [NO_ROOM] * (FILES - 10) + [HERE] * 10
    assert source.cache.room.used_bytes() == source.cache.room.recount() == 1_000


def test_a_kill_among_them_leaves_whole_files_and_no_lock(make_volume: MakeVolume, tmp_path: pathlib.Path) -> None:
    root = make_volume(FILES)
    log = tmp_path / "fired"
    text = f"""
from concurrent.futures import ThreadPoolExecutor
from sgpu.data.caching.arrivals import Arrivals
from sgpu.data.source import Source, SourceOptions
cache = Source(SourceOptions(url={str(root)!r}, min_free_disk_bytes=0)).cache
cache.room.used_bytes()
with ThreadPoolExecutor(16) as pool:
    list(pool.map(Arrivals(cache, lambda number, outcome: None).bring, range({FILES})))
"""
    killed = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "SGPU_FAILPOINT": "data.publish#20=kill", "SGPU_FAILPOINT_LOG": str(log)},
    )
    assert killed.returncode == -signal.SIGKILL
    assert "data.publish" in log.read_text()
    source = opened(root)
    there = [number for number in range(FILES) if source.cache.has(number)]
    assert len(there) == 19
    assert set(brought(source)[0].values()) == {HERE}
    assert source.counts().downloads == FILES - 19
    check(source, root)
    assert source.cache.room.recount() == 100 * FILES
