"""The ledger of the cache: one turn at a time whoever asks, and nothing left behind."""

from __future__ import annotations

import os
import pathlib
import pickle
import shutil
import threading
import time
from typing import Any

import pytest

from sgpu.contract.errors import InputError
from sgpu.data import VolumeFiles
from sgpu.data.caching import room as rooms
from sgpu.data.caching.ledger import Ledger
from sgpu.data.caching.room import STATE, Room
from sgpu.data.measuring.counters import Counters
from tests.data.conftest import MakeVolume


def made(root: pathlib.Path) -> Room:
    return Room(root, None, 0)


def test_threads_that_open_the_ledger_at_once_open_one(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room, beginning, opened = made(tmp_path), threading.Barrier(8, timeout=60), list[pathlib.Path]()

    def opened_slowly(file: pathlib.Path) -> Ledger:
        opened.append(file)
        time.sleep(0.05)
        return Ledger(file)

    def use() -> None:
        beginning.wait()
        room.used_bytes()

    monkeypatch.setattr(rooms, "Ledger", opened_slowly)
    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert opened == [tmp_path / STATE / "usage"]


def test_all_who_live_in_a_cache_that_is_removed_go_on_with_one_ledger(tmp_path: pathlib.Path) -> None:
    first, second = made(tmp_path / "cache"), made(tmp_path / "cache")
    assert first.used_bytes() == second.used_bytes() == 0
    shutil.rmtree(tmp_path / "cache")
    part = first.reserve(1000)
    assert part is not None
    os.close(part.descriptor)
    assert second.used_bytes() == 1000
    second.release(part.path, 1000)
    assert first.used_bytes() == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_fork_in_another_thread_s_turn_waits_for_its_own(tmp_path: pathlib.Path) -> None:
    room, began, may_end = made(tmp_path), threading.Event(), threading.Event()

    def hold() -> None:
        with room.turn():
            began.set()
            may_end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert began.wait(60)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writes, b"a")
        room.used_bytes()
        os.write(writes, b"z")
        os._exit(0)
    assert os.read(reads, 1) == b"a"
    os.set_blocking(reads, False)
    with pytest.raises(BlockingIOError):
        os.read(reads, 1)
    os.set_blocking(reads, True)
    may_end.set()
    assert os.read(reads, 1) == b"z"
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    os.close(reads)
    os.close(writes)


def test_a_room_that_is_let_go_closes_what_it_opened(tmp_path: pathlib.Path) -> None:
    def opened() -> int:
        return len(os.listdir("/proc/self/fd"))

    made(tmp_path).used_bytes()
    before = opened()
    for _ in range(5):
        made(tmp_path).used_bytes()
    assert opened() == before


def test_parts_that_cannot_all_be_made_are_all_taken_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = made(tmp_path)
    room.used_bytes()
    before, new_part = len(os.listdir("/proc/self/fd")), room._new_part

    def refuse(size: int) -> rooms.Part | None:
        if size == 3:
            raise OSError(24, "too many open files")
        return new_part(size)

    monkeypatch.setattr(room, "_new_part", refuse)
    with pytest.raises(OSError, match="too many open files"):
        room.reserve_all([1, 2, 3, 4])
    assert list((room.state / "parts").iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before
    assert room.used_bytes() == room.recount() == 0


@pytest.mark.parametrize("gone", ["", STATE, f"{STATE}/parts"])
def test_a_cache_that_somebody_removes_begins_anew(make_volume: MakeVolume, tmp_path: pathlib.Path, gone: str) -> None:
    files = VolumeFiles(make_volume(6), cache_dir=tmp_path / "cache", min_free_disk_bytes=0)
    for number in range(6):
        if number % 2:
            shutil.rmtree(tmp_path / "cache" / gone)
        assert pathlib.Path(files[number]).read_bytes() == content(files, number)
    room = files.source.cache.room
    assert room.used_bytes() == room.recount()


def test_a_cache_that_is_removed_while_a_file_comes(
    make_volume: MakeVolume, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = VolumeFiles(make_volume(3), cache_dir=tmp_path / "cache", min_free_disk_bytes=0)
    cache, removed = files.source.cache, []
    add_all = cache.sums.add_all

    def remove_once(found: Any) -> None:
        add_all(found)
        if not removed:
            shutil.rmtree(tmp_path / "cache")
            removed.append(True)

    monkeypatch.setattr(cache.sums, "add_all", remove_once)
    assert pathlib.Path(files[0]).read_bytes() == content(files, 0)
    assert removed
    assert cache.room.used_bytes() == cache.room.recount() == 100


def test_on_a_full_disk_a_run_goes_on_and_none_begins(
    make_volume: MakeVolume, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    volume, cache = make_volume(3), tmp_path / "cache"
    files = VolumeFiles(volume, cache_dir=cache, min_free_disk_bytes=0)
    monkeypatch.setattr("sgpu.contract.atomic.write_bytes", refuse)
    monkeypatch.setattr(os, "pwrite", refuse)
    in_a_worker = pickle.loads(pickle.dumps(files))
    with pytest.warns(UserWarning, match="has no room left"):
        assert pathlib.Path(in_a_worker[0]).read_bytes() == content(files, 0)
    with pytest.raises(InputError, match=r"the disk of cache folder .* is full"):
        VolumeFiles(volume, cache_dir=cache, min_free_disk_bytes=0)


def content(files: VolumeFiles, number: int) -> bytes:
    """What stands in the file of this number."""
    return (pathlib.Path(files.url) / files.source.listing.path(number)).read_bytes()


def test_no_count_is_lost_where_threads_count_first_at_once(tmp_path: pathlib.Path) -> None:
    for number in range(40):
        counters, beginning = Counters(tmp_path / str(number)), threading.Barrier(16, timeout=60)

        def count(counters: Counters = counters, beginning: threading.Barrier = beginning) -> None:
            beginning.wait()
            counters.add(downloads=1, downloaded_bytes=10)

        threads = [threading.Thread(target=count) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = counters.total()
        assert (found.downloads, found.downloaded_bytes) == (16, 160)
