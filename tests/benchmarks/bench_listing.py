"""Listing volumes of a thousand, a hundred thousand, a million files: time, room, and the first batch.

Files are empty and lie in folders of a thousand, on the disk of TMPDIR. `list_s` is the first listing of the volume,
`again_s` a second one by the same process; `bytes_a_file` is the listing's file, which all processes of a node map;
`first_batch_s` is from the constructor of the data set to the first batch, the listing included; `worker_mb` is what a
loader's worker holds for itself after 50 batches (its unique memory).
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

_A_FOLDER = 1000
_BATCHES = 50


def run(quick: bool) -> list[dict[str, Any]]:
    counts = (1000, 10_000) if quick else (1000, 100_000, 1_000_000)
    rows = []
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            volume = pathlib.Path(folder) / "volume"
            _fill(volume, count)
            environment = {**os.environ, "SGPU_HOME": f"{folder}/home", "PYTHONWARNINGS": "ignore"}
            told = subprocess.run(
                [sys.executable, "-m", "tests.benchmarks.bench_listing", str(volume)], env=environment, check=True,
                stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            rows.append({"files": count, **json.loads(told.stdout)})
    return rows


def _fill(volume: pathlib.Path, count: int) -> None:
    for start in range(0, count, _A_FOLDER):
        folder = volume / f"part-{start // _A_FOLDER:05}"
        folder.mkdir(parents=True)
        for number in range(start, min(count, start + _A_FOLDER)):
            os.close(os.open(f"{folder}/image-{number:08}.jpg", os.O_CREAT | os.O_WRONLY))


def _measure(volume: str) -> dict[str, Any]:
    import psutil

    from sgpu.data.dataset import VolumeDataset
    from sgpu.data.finding import list_volume
    from sgpu.data.loader import DataLoader
    from sgpu.data.volumes.opening import open_volume

    opened = open_volume(volume)
    began = time.perf_counter()
    files = VolumeDataset(volume, shuffle=True)
    listed = time.perf_counter() - began
    with DataLoader(files, 16, num_workers=1) as loader:
        batches = iter(loader)
        next(batches)
        first = time.perf_counter() - began
        for _ in range(min(_BATCHES, len(loader) - 1)):
            next(batches)
        workers = [child for child in psutil.Process().children() if "fetcher" not in " ".join(child.cmdline())]
        held = max(worker.memory_full_info().uss for worker in workers)
    began = time.perf_counter()
    list_volume(opened, "**/*")
    return {
        "list_s": listed, "again_s": time.perf_counter() - began,
        "bytes_a_file": files.source.listing.file.stat().st_size / len(files), "first_batch_s": first,
        "worker_mb": held / 1e6,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1])))
