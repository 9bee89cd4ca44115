"""Reading files of a slow volume: this loader, torch's, other libraries' where they are installed, and the bare files.

Every row is one process that reads all files twice, with batches of 16. The volume has 20 ms an open and 100 MB/s that
all readers share; files are of 100 KB and not decoded, so no reader can be faster than `of_bandwidth` 1 while it reads
the volume. "step" adds a sleep of 50 ms a batch, as a GPU that computes. `fetch_ms` is what the loop waits for a batch,
mean, without the first. Only ratios within one run mean anything. Peers are those of
data_peers.py.
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks import data_peers
from tests.benchmarks.table import show

BATCH = 16
FILE_BYTES = 100_000
OPEN_SECONDS = 0.02
BYTES_PER_SECOND = 100e6
STEP_SECONDS = 0.05
SYSTEMS = ("files, 64 threads", "torch", "sgpu")


def run(quick: bool) -> list[dict[str, Any]]:
    files = 320 if quick else 2000
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        volume = pathlib.Path(folder) / "volume"
        volume.mkdir()
        for number in range(files):
            (volume / f"{number:05}.bin").write_bytes(os.urandom(FILE_BYTES))
        for system in SYSTEMS:
            for workers in (0,) if system.startswith("files") else (0, 2) if quick else (0, 4):
                for mode in ("free",) if quick or system.startswith("files") else ("free", "step"):
                    rows += _in_a_process(folder, system=system, workers=workers, mode=mode)
        for peer, version in data_peers.installed().items():
            data_peers.convert(peer, volume, pathlib.Path(folder) / peer)
            workers = 0 if "threads" in peer else 2 if quick else 4
            for mode in ("free",) if quick else ("free", "step"):
                found = _in_a_process(folder, system=peer, workers=workers, mode=mode)
                rows += [{**row, "version": version} for row in found]
            shutil.rmtree(pathlib.Path(folder) / peer, ignore_errors=True)
    return rows


def _in_a_process(folder: str, **case: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as home:
        environment = {
            **os.environ, "SGPU_HOME": home, "SLOW_FOLDER": folder, "SLOW_PIPE": f"{home}/pipe",
            "SLOW_OPEN_SECONDS": str(OPEN_SECONDS), "SLOW_BYTES_PER_SECOND": str(BYTES_PER_SECOND),
            "PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent / "slow"), os.getcwd()]),
            "PYTHONWARNINGS": "ignore",
        }  # fmt: skip
        told = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.bench_data", json.dumps({
                "volume": f"{folder}/volume", "shards": f"{folder}/{case['system']}", "home": home, **case,
            })],
            env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=600,
        )  # fmt: skip
        rows: list[dict[str, Any]] = json.loads(told.stdout)
        return rows


def _read_twice(case: dict[str, Any]) -> list[dict[str, Any]]:
    passes = _passes(case)
    next(passes)
    began = time.perf_counter()
    rows = []
    for epoch in (1, 2):
        start = began if epoch == 1 else time.perf_counter()
        samples, waits, asked = 0, [], start
        for batch in next(passes):
            waits.append(time.perf_counter() - asked)
            samples += len(batch)
            if case["mode"] == "step":
                time.sleep(STEP_SECONDS)
            asked = time.perf_counter()
        seconds = time.perf_counter() - start
        rows.append({
            "reads": case["system"], "workers": case["workers"], "mode": case["mode"], "epoch": epoch,
            "samples_per_second": samples / seconds, "of_bandwidth": samples * FILE_BYTES / seconds / BYTES_PER_SECOND,
            "first_batch_seconds": waits[0], "fetch_ms": 1e3 * sum(waits[1:]) / max(1, len(waits) - 1),
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
            self.paths = sorted(pathlib.Path(case["volume"]).iterdir())

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, number: int) -> bytes:
            return _body(self.paths[number])

    class Through(IterableDataset[bytes]):
        def __init__(self) -> None:
            self.volume = VolumeDataset(case["volume"], shuffle=True)

        def __iter__(self) -> Iterator[bytes]:
            return map(_body, self.volume)

    if case["system"] in data_peers.PEERS:
        importlib.import_module(data_peers.PEERS[case["system"]][0])
    yield iter(())
    workers = case["workers"]
    if case["system"] == "torch":
        plain = TorchLoader(
            Direct(), BATCH, shuffle=True, num_workers=workers, collate_fn=list, persistent_workers=workers > 0
        )
        yield from iter(lambda: iter(plain), None)
    elif case["system"] == "sgpu":
        with DataLoader(Through(), BATCH, num_workers=workers, collate_fn=list) as loader:
            yield from iter(lambda: iter(loader), None)
    elif case["system"] in data_peers.PEERS:
        yield from data_peers.passes(case["system"], case["volume"], case["shards"], case["home"], workers, _body)
    else:
        paths = Direct().paths
        with ThreadPoolExecutor(64) as pool:
            yield from iter(lambda: ([body] for body in pool.map(_body, paths)), None)


def _body(path: Any) -> bytes:
    """A tenth of a file's bytes, so that what goes between processes does not decide."""
    with open(path, "rb") as file:
        return file.read()[: FILE_BYTES // 10]


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
        print(json.dumps(_read_twice(json.loads(sys.argv[1]))))
    else:
        show(run("--quick" in sys.argv))
