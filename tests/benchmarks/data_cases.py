"""What the benchmark of data reads: a folder or an S3 server, of what files, and what is made of each."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np

OPEN_SECONDS = 0.02
BYTES_PER_SECOND = 100e6
_TAKEN_BYTES = 10_000
_JPEG = "BENCH_JPEG"
_DECODES = _JPEG in os.environ
_SLOW = pathlib.Path(__file__).parent / "slow"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Attributes: `only`: how the names of the systems to run begin; none: all."""

    store: str
    file_bytes: int
    files: int
    jpeg: bool
    only: tuple[str, ...]
    workers: int = 4
    free: bool = False

    def wants(self, system: str) -> bool:
        return not self.only or any(system.startswith(part) for part in self.only)


def parse(more: Sequence[str], *, quick: bool) -> Case:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks data")
    parser.add_argument("--store", choices=("folder", "s3"), default="folder")
    parser.add_argument("--file-bytes", type=int, default=100_000)
    parser.add_argument("--files", type=int, help="none: two seconds' worth of bandwidth, at most 4,000")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--free", action="store_true", help="without the runs that compute between batches")
    parser.add_argument("--jpeg", action="store_true", help="decode each file, a picture of about 100 KB")
    parser.add_argument("--only", action="append", default=[], help="how a system's name begins; may come again")
    told = parser.parse_args(more)
    files = told.files or min(4000, int(2 * BYTES_PER_SECOND / told.file_bytes))
    return Case(
        store=told.store, file_bytes=told.file_bytes, files=min(files, 320) if quick else files, jpeg=told.jpeg,
        only=tuple(told.only), workers=2 if quick else told.workers,
        free=quick or told.jpeg or told.free,
    )  # fmt: skip


# ---- the files


def make_files(folder: pathlib.Path, case: Case) -> None:
    folder.mkdir(parents=True)
    picture = _picture() if case.jpeg else b""
    for number in range(case.files):
        body = picture if case.jpeg else os.urandom(case.file_bytes)
        (folder / f"{number:05}.{'jpg' if case.jpeg else 'bin'}").write_bytes(body)


def _picture() -> bytes:
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (96, 128, 3), np.uint8)
    written = io.BytesIO()
    Image.fromarray(noise).resize((512, 384), Image.Resampling.BICUBIC).save(written, "JPEG", quality=92)
    return written.getvalue()


@dataclass(frozen=True, kw_only=True)
class Served:
    """Attributes: `store`: of the volume, without its latency; None: a mounted folder."""

    volume: str
    environment: dict[str, str]
    store: Any = None

    def upload(self, folder: pathlib.Path) -> str:
        """Where a folder beside the volume's files is as slow as the volume."""
        if self.store is None:
            return str(pathlib.Path(self.volume).with_name(folder.name))
        if not folder.exists():
            return ""
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        self.store.put([f"{folder}/{name}" for name in names], [f"bucket/{folder.name}/{name}" for name in names])
        return f"s3://bucket/{folder.name}"


@contextlib.contextmanager
def mounted(folder: pathlib.Path) -> Iterator[str]:
    """A mount of the folder that is far away (slow/mount.c), in a process of its own."""
    place, program = folder.parent / "mount", folder.parent / "slow_mount"
    place.mkdir()
    try:
        libfuse = subprocess.check_output(["pkg-config", "--cflags", "--libs", "fuse3"], text=True).split()
        subprocess.run(["cc", "-O2", str(_SLOW / "mount.c"), "-o", str(program), *libfuse], check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise SystemExit(
            f"the slow volume is a FUSE mount that is compiled here, and could not be: {problem}. It needs `apt-get "
            "install fuse3 libfuse3-dev gcc pkg-config`; --store s3 does without"
        ) from problem
    told = [str(program), str(folder), str(place), str(OPEN_SECONDS), str(BYTES_PER_SECOND)]
    with subprocess.Popen(told) as mount:
        try:
            while not place.is_mount():
                if mount.poll() is not None:
                    raise SystemExit(
                        f"the slow volume could not be mounted (exit status {mount.returncode}); is FUSE allowed here?"
                    )
                time.sleep(0.01)
            yield str(place)
        finally:
            mount.terminate()  # it unmounts


@contextlib.contextmanager
def served(folder: pathlib.Path, case: Case) -> Iterator[Served]:
    """Where the files are then, and what a process needs so that they are as slow as they should be."""
    environment = {_JPEG: "1"} if case.jpeg else {}
    if case.store == "folder":
        with mounted(folder.parent) as there:
            yield Served(volume=f"{there}/{folder.name}", environment=environment)
        return
    from tests.checkpoint.servers import running_s3

    home = folder.parent / "s3"
    home.mkdir()
    with running_s3(home) as server:
        store = fsspec.filesystem(
            "s3", key=server.key, secret=server.secret, endpoint_url=f"http://127.0.0.1:{server.port}",
            client_kwargs={"region_name": "us-east-1"},
        )  # fmt: skip
        store.put([str(path) for path in folder.iterdir()], [f"bucket/volume/{path.name}" for path in folder.iterdir()])
        proxy = subprocess.Popen(
            [sys.executable, str(_SLOW / "proxy.py"), "127.0.0.1", str(server.port), str(OPEN_SECONDS),
             str(BYTES_PER_SECOND)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert proxy.stdin is not None
        assert proxy.stdout is not None
        try:
            told = server.variables(int(proxy.stdout.readline()))
            told["S3_ENDPOINT_URL"] = told["AWS_ENDPOINT_URL"]  # MosaicML Streaming's own name of it
            yield Served(volume="s3://bucket/volume", environment={**environment, **told}, store=store)
        finally:
            proxy.stdin.close()
            proxy.wait()


# ---- what is made of each


def cut(content: bytes) -> bytes:
    """Some of its bytes, so that what goes between processes does not decide; of a picture, of what it shows."""
    return _decoded(content) if _DECODES else content[:_TAKEN_BYTES]


def _decoded(content: bytes) -> bytes:
    from PIL import Image

    return Image.open(io.BytesIO(content)).convert("RGB").tobytes()[:_TAKEN_BYTES]


def body(path: Any) -> bytes:
    with open(path, "rb") as file:
        return cut(file.read())


class Reader:
    """The files themselves by their names, from a folder or S3; of each process its own client."""

    def __init__(self, volume: str) -> None:
        self.volume, self._store, self._pid = volume, None, 0
        if volume.startswith("s3://"):
            self.names = sorted(fsspec.filesystem("s3", skip_instance_cache=True).find(volume))
        else:
            self.names = [str(path) for path in sorted(pathlib.Path(volume).iterdir())]
        self.urls = [f"s3://{name}" if volume.startswith("s3://") else name for name in self.names]

    def __call__(self, name: str) -> bytes:
        if not self.volume.startswith("s3://"):
            return body(name)
        if self._pid != os.getpid():
            self._store, self._pid = fsspec.filesystem("s3", skip_instance_cache=True), os.getpid()
        store: Any = self._store
        return cut(store.cat_file(name))


def decoded_a_second(folder: pathlib.Path, beside: str | None) -> float:
    """Pictures that as many processes as cores decode from the local disk.

    Args:
        beside: 64 threads read the same files from there meanwhile, each once: what every reader of it has to do, too.
    """
    paths = sorted(folder.iterdir())
    with ProcessPoolExecutor(os.cpu_count()) as pool, ThreadPoolExecutor(64) as threads:
        sum(pool.map(_decode, paths[:64], chunksize=4))
        began = time.perf_counter()
        reading = threads.map(lambda path: len(pathlib.Path(beside, path.name).read_bytes()), paths) if beside else ()
        sum(pool.map(_decode, paths, chunksize=16))
        sum(reading)
        return len(paths) / (time.perf_counter() - began)


def _decode(path: pathlib.Path) -> int:
    return len(_decoded(path.read_bytes()))
