"""The process that fetches ahead: what it brings, when it runs, and that it never stays."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import psutil
import pytest

from sgpu.data import DataLoader, VolumeDataset, VolumeFiles
from sgpu.data.fetching.fetcher import Bounds, Fetcher, bounds
from sgpu.data.fetching.flight import Flight
from sgpu.data.ordering.walk import WalkPlan, walk
from sgpu.data.source import Source, SourceOptions
from tests.data.conftest import MakeVolume, being, eventually
from tests.data.samples import Numbers, Wrapped

EIGHT = Flight(limit=8, least=8, most=8)
MANY = 600  # more than a fetcher brings before the loop goes on, so that it does not end by itself


def fetchers() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "sgpu.data.fetching.fetcher" in child.cmdline():
                found.append(child)
        except psutil.Error:
            continue
    return found


def plan(samples: int, **more: Any) -> WalkPlan:
    return WalkPlan(**{
        "samples": samples, "batch": 4, "world": 1, "rank": 0, "seed": 0, "shuffle": True, "drop_last": False, **more
    })  # fmt: skip


def loader(root: pathlib.Path, workers: int = 0, **more: Any) -> DataLoader[Any]:
    return DataLoader(Wrapped(VolumeDataset(root, shuffle=True, **more)), 4, num_workers=workers)


def test_a_walk_is_what_the_loader_will_hand_out(make_volume: MakeVolume) -> None:
    root = make_volume(50)
    for rank in range(2):
        with being(rank, 2):
            iterated = loader(root)
            handed = [number for _ in range(2) for batch in iterated for number in batch.tolist()]
        files = VolumeFiles(root)
        steps = walk(plan(50, world=2, rank=rank), 0, 0)
        foreseen: list[int] = []
        while len(foreseen) < len(handed):
            foreseen += [int(pathlib.Path(files.relative(number)).stem) for number in next(steps).numbers.tolist()]
        assert foreseen == handed
    middle = next(walk(plan(50, world=2), 3, 48))
    assert (middle.end, len(middle.numbers)) == ((3, 50), 1)


def test_files_come_ahead_of_the_loop_and_over_the_edge_of_the_epoch(
    make_volume: MakeVolume, home: pathlib.Path
) -> None:
    root = make_volume(100)
    with loader(root) as running:
        iterator = iter(running)
        next(iterator)
        assert running._running._follower._ahead is not None
        eventually(lambda: len(list((home / "cache").rglob("*.bin"))) == 100)
        rest = list(iterator)
        assert len(rest) == 24
        counts = running.stats()
        assert (counts.cache_misses, counts.downloaded_bytes) == (100, 10_000)
    assert fetchers() == []


def test_it_stays_within_its_bounds_and_moves_with_the_loop(make_volume: MakeVolume) -> None:
    root = make_volume(200)
    source = Source(SourceOptions(url=str(root)))
    fetcher = Fetcher(source, plan(200, shuffle=False), Bounds(files=40, size_bytes=2**30, flight=EIGHT), 0, 0, 0)

    def here() -> list[int]:
        return [number for number in range(200) if source.cache.has(number)]

    fetcher.fill()
    eventually(lambda: here() == list(range(40)))
    fetcher.told(0, 0, 8)
    fetcher.fill()
    assert fetcher._files == 32, "for so few it wakes no threads"
    fetcher.told(0, 0, 20)
    fetcher.fill()
    eventually(lambda: here() == list(range(60)))
    fetcher.told(1, 0, 180)
    fetcher.fill()
    eventually(lambda: here() == [*range(60), *range(180, 200)])
    narrow = Fetcher(source, plan(200, shuffle=False), Bounds(files=400, size_bytes=1000, flight=EIGHT), 0, 0, 100)
    narrow.fill()
    eventually(lambda: {100, 111} <= set(here()))
    assert not {112, 120} & set(here())
    assert not narrow.is_done
    wide = Fetcher(source, plan(200), Bounds(files=200, size_bytes=2**30, flight=EIGHT), 0, 0, 0)
    eventually(lambda: wide.fill() or wide.is_done)
    assert here() == list(range(200))


def test_bounds_follow_the_size_of_the_files(make_volume: MakeVolume) -> None:
    small = Source(SourceOptions(url=str(make_volume(4, size_bytes=100, name="small")), cache_limit_bytes=300))
    large = Source(SourceOptions(url=str(make_volume(2, size_bytes=4_000_000, name="large"))))
    found = [(limits.flight.limit, limits.flight.most) for limits in (bounds(small, 16), bounds(large, 16))]
    assert found == [(64, 256), (8, 134)]
    assert bounds(small, 16).size_bytes == 300
    assert bounds(small, 1000).files == 8000


def test_there_is_none_where_it_would_find_nothing_to_do(make_volume: MakeVolume) -> None:
    with loader(make_volume(20, name="small")) as few:
        next(iter(few))
        assert fetchers() == []
    root = make_volume(100, name="large")
    list(VolumeDataset(root))
    with loader(root) as cached:
        next(iter(cached))
        assert fetchers() == []
    with DataLoader(Numbers(500), num_workers=0) as no_files:
        next(iter(no_files))
        assert fetchers() == []


def test_map_style_data_around_files_is_fetched_ahead_too(make_volume: MakeVolume, home: pathlib.Path) -> None:
    class Around(Numbers):
        def __init__(self, files: VolumeFiles) -> None:
            super().__init__(len(files))
            self.files = files

    with DataLoader(Around(VolumeFiles(make_volume(100))), 4, num_workers=0) as running:
        next(iter(running))
        eventually(lambda: len(list((home / "cache").rglob("*.bin"))) == 100)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loop_does_without_a_fetcher_that_died(workers: int, make_volume: MakeVolume) -> None:
    with loader(make_volume(MANY), workers) as running:
        iterator = iter(running)
        handed = next(iterator).tolist()
        victim = fetchers()[0]
        victim.kill()
        victim.wait(10)
        handed += [number for batch in iterator for number in batch.tolist()]
        assert sorted(handed) == list(range(MANY))
        assert sorted(number for batch in running for number in batch.tolist()) == list(range(MANY))


def test_a_loader_that_is_dropped_takes_its_processes_along(make_volume: MakeVolume) -> None:
    before = psutil.Process().children(recursive=True)
    running = loader(make_volume(MANY), 1)
    iterator = iter(running)
    next(iterator)
    children = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert len(children) == 2
    del running, iterator
    assert psutil.wait_procs(children, timeout=20)[1] == []


def test_it_dies_with_its_parent(make_volume: MakeVolume, home: pathlib.Path) -> None:
    """Also where a worker that was forked holds the other end of its pipe."""
    text = f"""
import os, sys, time
sys.path.insert(0, {os.getcwd()!r})
from sgpu.data import DataLoader, VolumeDataset
loader = DataLoader(VolumeDataset({str(make_volume(2000))!r}), 4, num_workers=1)
iterator = iter(loader)
next(iterator)
print(loader._running._follower.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    fetcher = psutil.Process(int(parent.stdout.readline()))
    others = psutil.Process(parent.pid).children(recursive=True)
    assert len(others) == 2
    assert "sgpu.data.fetching.fetcher" in fetcher.cmdline()
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert psutil.wait_procs(others, timeout=30)[1] == []
    state = home / "cache" / ".state"
    VolumeDataset(make_volume(1, name="other"))
    assert len(list((state / "claims").iterdir())) <= 1
    assert list((state / "parts").iterdir()) == []


def test_it_ignores_an_interrupted_cell(make_volume: MakeVolume) -> None:
    with loader(make_volume(MANY)) as running:
        next(iter(running))
        fetcher = fetchers()[0]

        def ignored() -> int:
            status = pathlib.Path(f"/proc/{fetcher.pid}/status").read_text()
            return int(next(line for line in status.splitlines() if line.startswith("SigIgn")).split()[1], 16)

        eventually(lambda: ignored() & 1 << signal.SIGINT - 1)
        fetcher.send_signal(signal.SIGINT)
        with pytest.raises(psutil.TimeoutExpired):
            fetcher.wait(0.3)


def test_a_walk_under_drop_last_skips_what_is_dropped() -> None:
    steps = walk(plan(10, drop_last=True, shuffle=False), 0, 0)
    found = [next(steps) for _ in range(3)]
    assert [stretch.end for stretch in found] == [(0, 4), (0, 10), (1, 4)]
    assert np.concatenate([stretch.numbers for stretch in found]).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3]
