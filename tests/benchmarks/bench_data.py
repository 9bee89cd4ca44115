"""Reading files of a slow volume: this loader, torch's, other libraries' where they are installed, and the bare files.

Every row is one process that reads all files twice, with batches of 16. The volume has 20 ms an open (a request) and
100 MB/s that all readers share, so no reader can be faster than `of_limit` 1 while it reads the volume (a FUSE mount,
slow/mount.c). "step" adds a sleep of 50 ms a batch, as a GPU that computes. `fetch_ms` is what the loop waits for a
batch, mean, without the first.
Only ratios within one run mean anything. Peers are those of data_peers.py. Of pictures `of_limit` is the share of what
as many processes as cores decode and do nothing else, measured just before and after each reader, and
`of_decoding_and_reading` of what is left of that beside bare reads of the volume by 64 threads.

`cpu_us` is the CPU time of all processes of a reader, a sample, with what its processes took to begin.

python -m tests.benchmarks data [--store s3] [--file-bytes N] [--jpeg] [--free] [--files N] [--workers N]
    [--only NAME]...
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tests.benchmarks import data_peers
from tests.benchmarks.cpu import CpuClock
from tests.benchmarks.data_cases import (
    BYTES_PER_SECOND,
    Case,
    Reader,
    body,
    decoded_a_second,
    make_files,
    parse,
    served,
)
from tests.benchmarks.table import show

BATCH = 16
STEP_SECONDS = 0.05
FILES = "files, 64 threads"
LOCAL = "torch, files on the local disk"


def run(quick: bool, more: Sequence[str] = ()) -> list[dict[str, Any]]:
    case = parse(more, quick=quick)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        volume = pathlib.Path(folder) / "files" / "volume"
        make_files(volume, case)
        with served(volume, case) as there:
            limits = partial(_limits, case, volume, there.volume)
            for number, (system, workers, modes) in enumerate(_wanted(case)):
                shards = volume.with_name(f"shards{number}")
                data_peers.convert(system, volume, shards)
                place = there.upload(shards)
                for mode in modes:
                    rows += _in_a_process(
                        limits, there.environment, volume=str(volume) if system == LOCAL else there.volume,
                        shards=place, system=system, workers=workers, mode=mode,
                    )  # fmt: skip
                shutil.rmtree(shards, ignore_errors=True)
    return rows


def _limits(case: Case, files: pathlib.Path, volume: str) -> dict[str, float]:
    """Samples a second: of the volume; of pictures, what decoding allows just now, without and with bare reading."""
    of_volume = BYTES_PER_SECOND / next(files.iterdir()).stat().st_size
    if not case.jpeg:
        return {"of_limit": of_volume}
    beside = {"of_decoding_and_reading": volume} if case.store == "folder" else {}
    return {
        name: min(of_volume, decoded_a_second(files, place)) for name, place in {"of_limit": None, **beside}.items()
    }


def _wanted(case: Case) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Systems, with their workers and modes."""
    several, both = case.workers, ("free",) if case.free else ("free", "step")
    here, local = data_peers.installed(), case.jpeg and case.store == "folder"
    absent = data_peers.PEERS.keys() - here.keys()
    if absent:
        print(f"not installed: {', '.join(sorted(absent))}")
    print("versions:", ", ".join(f"{name} {version}" for name, version in here.items()) or "no peers")
    yield from (
        row for row in (
            (FILES, 0, ("free",)), ("torch", several, both), *([(LOCAL, several, both)] if local else []),
            ("sgpu", 0, both),
            ("sgpu", several, both), *((name, 0 if "threads" in name else several, both) for name in here),
        ) if case.wants(row[0])
    )  # fmt: skip


def _in_a_process(
    limits: Callable[[], dict[str, float]], environment: dict[str, str], **case: Any
) -> list[dict[str, Any]]:
    """With its share of the limits, each the mean of what it was before and after: a machine's pace changes."""
    before = limits()
    with tempfile.TemporaryDirectory() as home:
        told = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.bench_data", json.dumps({"home": home, **case})],
            env={**os.environ, "SGPU_HOME": home, "PYTHONWARNINGS": "ignore", **environment},
            stdout=subprocess.PIPE, check=True, text=True, timeout=600,
        )  # fmt: skip
        rows: list[dict[str, Any]] = json.loads(told.stdout.splitlines()[-1])
        for name, limit in limits().items():
            for row in rows:
                row[name] = row["samples_per_second"] * 2 / (before[name] + limit)
        show(rows)  # at once, since all of them take minutes
        return rows


def _read_twice(case: dict[str, Any]) -> list[dict[str, Any]]:
    passes = _passes(case)
    next(passes)
    began = time.perf_counter()
    rows = []
    for epoch in (1, 2):
        start = began if epoch == 1 else time.perf_counter()
        samples, waits, asked, cpu = 0, [], start, CpuClock()
        for batch in next(passes):
            waits.append(time.perf_counter() - asked)
            samples += len(batch)
            if case["mode"] == "step":
                time.sleep(STEP_SECONDS)
            asked = time.perf_counter()
        seconds = time.perf_counter() - start
        rows.append({
            "reads": case["system"], "workers": case["workers"], "mode": case["mode"], "epoch": epoch,
            "samples_per_second": samples / seconds, "first_batch_seconds": waits[0],
            "fetch_ms": 1e3 * sum(waits[1:]) / max(1, len(waits) - 1),
            "cpu_us": 1e6 * cpu.seconds() / samples,
        })  # fmt: skip
    return rows


def _passes(case: dict[str, Any]) -> Iterator[Iterator[Any]]:
    """First nothing, with all that is imported; then an iterator over batches an epoch, the first with its loader."""
    from torch.utils.data import DataLoader as TorchLoader
    from torch.utils.data import Dataset, IterableDataset

    from sgpu.data.dataset import VolumeDataset
    from sgpu.data.loader import DataLoader

    class Direct(Dataset[bytes]):
        def __init__(self) -> None:
            self.read = Reader(case["volume"])

        def __len__(self) -> int:
            return len(self.read.names)

        def __getitem__(self, number: int) -> bytes:
            return self.read(self.read.names[number])

    class Through(IterableDataset[bytes]):
        def __init__(self) -> None:
            self.volume = VolumeDataset(case["volume"], shuffle=True)

        def __iter__(self) -> Iterator[bytes]:
            return map(body, self.volume)

    if case["system"] in data_peers.PEERS:
        importlib.import_module(data_peers.PEERS[case["system"]][0])
    if case["volume"].startswith("s3://"):
        importlib.import_module("s3fs")
    yield iter(())
    workers = case["workers"]
    if case["system"] in ("torch", LOCAL):
        plain = TorchLoader(
            Direct(), BATCH, shuffle=True, num_workers=workers, collate_fn=list, persistent_workers=workers > 0
        )
        yield from iter(lambda: iter(plain), None)
    elif case["system"] == "sgpu":
        with DataLoader(Through(), BATCH, num_workers=workers, collate_fn=list) as loader:
            yield from iter(lambda: iter(loader), None)
    elif case["system"] in data_peers.PEERS:
        yield from data_peers.passes(case["system"], case["volume"], case["shards"], case["home"], workers)
    else:
        read = Reader(case["volume"])
        with ThreadPoolExecutor(64) as pool:
            yield from iter(lambda: ([found] for found in pool.map(read, read.names)), None)


if __name__ == "__main__":
    print(json.dumps(_read_twice(json.loads(sys.argv[1]))))
