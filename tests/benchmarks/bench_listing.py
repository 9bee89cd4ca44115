"""Listing volumes of a thousand, a hundred thousand, a million files: time, room, and the first batch.

"folder": empty files in folders of a thousand, on the disk of TMPDIR (in memory a million are made in a minute). "url":
a store that makes its answers up, as fsspec gives them. All in a process of its own for each row, which is the first to
look. `store_s` are CPU seconds of the bare questions (scandir and stat; fsspec's find); `list_s` those of the first
listing, these and the file of the listing included; `wall_s` what it took; `bytes_a_file` is the listing's file, which
all processes of a node map; `first_batch_s` is from the constructor of the data set to the first batch, the listing
included; `worker_mb` is what a loader's worker has written for itself after 50 batches (the listing's pages belong to
the kernel), and `peak_mb` the most that the process that lists has had.
"""

from __future__ import annotations

import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import fsspec

from tests.benchmarks.generated import register_in

_A_FOLDER = 1000
_BATCHES = 50


def run(quick: bool) -> list[dict[str, Any]]:
    volumes = [("folder", 1000), ("url", 1000), ("folder", 10_000), ("url", 10_000)]
    if not quick:
        volumes = [(kind, count) for count in (1_000, 100_000, 1_000_000) for kind in ("folder", "url")]
    return [{"volume": kind, "files": count, **_in_a_process(kind, count)} for kind, count in volumes]


def _in_a_process(kind: str, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        volume, knows = pathlib.Path(folder) / "volume", pathlib.Path(folder) / "knows"
        register_in(knows)
        if kind == "folder":
            _fill(volume, count)
        environment = {
            **os.environ, "SGPU_HOME": f"{folder}/home", "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": os.pathsep.join((str(knows), os.getcwd())),
        }  # fmt: skip
        told = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.bench_listing",
             str(volume) if kind == "folder" else f"generated://{count}"],
            env=environment, check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        measured: dict[str, Any] = json.loads(told.stdout)
        return measured


def _fill(volume: pathlib.Path, count: int) -> None:
    for start in range(0, count, _A_FOLDER):
        folder = volume / f"part-{start // _A_FOLDER:05}"
        folder.mkdir(parents=True)
        for number in range(start, min(count, start + _A_FOLDER)):
            os.close(os.open(f"{folder}/image-{number:08}.jpg", os.O_CREAT | os.O_WRONLY))


def _measure(volume: str) -> dict[str, Any]:
    import psutil

    from sgpu.data.dataset import VolumeDataset
    from sgpu.data.loader import DataLoader

    began, cpu = time.perf_counter(), time.process_time()
    files = VolumeDataset(volume, shuffle=True)
    listed, wall = time.process_time() - cpu, time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    with DataLoader(files, 16, num_workers=1) as loader:
        batches = iter(loader)
        next(batches)
        first = time.perf_counter() - began
        for _ in range(min(_BATCHES, len(loader) - 1)):
            next(batches)
        workers = [child for child in psutil.Process().children() if "fetcher" not in " ".join(child.cmdline())]
        shared = str(files.source.listing.file)  # where TMPDIR is in memory its pages count as written, by whoever
        held = max(
            sum(part.private_dirty for part in worker.memory_maps() if part.path != shared) for worker in workers
        )
    cpu = time.process_time()
    asked = sum(1 for _ in _bare(volume))
    return {
        "store_s": time.process_time() - cpu, "list_s": listed, "wall_s": wall,
        "bytes_a_file": files.source.listing.file.stat().st_size / asked, "first_batch_s": first,
        "worker_mb": held / 1e6, "peak_mb": peak,
    }  # fmt: skip


def _bare(volume: str) -> Iterator[object]:
    """What any listing has to ask."""
    if "://" in volume:
        yield from fsspec.core.url_to_fs(volume)[0].find(volume, detail=True)
        return
    with os.scandir(volume) as scan:
        for item in scan:
            if item.is_dir():
                yield from _bare(item.path)
            else:
                yield item.stat()


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
