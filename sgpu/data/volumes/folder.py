"""A volume that is a folder of this machine: a disk, or a mount such as /Volumes or /dbfs."""

from __future__ import annotations

import contextlib
import os
import stat
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from sgpu.contract.errors import VolumeError
from sgpu.data.volumes.entry import CHUNK_BYTES, Entry, changed, write_all
from sgpu.data.volumes.holes import stretches

_SLOW_STAT_SECONDS = 1e-4
_STAT_THREADS = 32


class FolderVolume:
    """Lists a folder, with many questions under way where each takes long, and copies files out of it."""

    def __init__(self, path: str) -> None:
        self.url = os.path.abspath(os.path.expanduser(path))
        if not os.path.exists(self.url):
            raise VolumeError(
                f"volume {self.url} does not exist. Expected a folder; check the path, and that the volume is mounted "
                "on this machine.",
                url=self.url,
            )
        if not os.path.isdir(self.url):
            raise VolumeError(f"volume {self.url} is a file; expected the folder that holds the files", url=self.url)

    def entries(self) -> Iterator[Entry]:
        paths = self._paths("", set())
        began, first = time.perf_counter(), list(islice(paths, 16))
        found = [self._entry(path) for path in first]
        slow = bool(first) and (time.perf_counter() - began) / len(first) > _SLOW_STAT_SECONDS
        yield from filter(None, found)
        if not slow:
            yield from filter(None, map(self._entry, paths))
            return
        with ThreadPoolExecutor(_STAT_THREADS) as pool:  # a mount answers many questions at a time, each slowly
            yield from filter(None, pool.map(self._entry, paths))

    def _paths(self, folder: str, seen: set[tuple[int, int]]) -> Iterator[str]:
        here = os.path.join(self.url, folder) if folder else self.url
        inside: list[str] = []
        try:
            status = os.stat(here)
            if (status.st_dev, status.st_ino) in seen:
                return
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(here) as scan:
                for item in scan:
                    path = f"{folder}/{item.name}" if folder else item.name
                    if item.is_dir():
                        inside.append(path)
                    else:
                        yield path
        except OSError as problem:
            raise VolumeError(
                f"folder {here} of volume {self.url} cannot be read: {problem.strerror}. Check its permissions.",
                url=self.url,
            ) from problem
        for path in sorted(inside):
            yield from self._paths(path, seen)

    def _entry(self, path: str) -> Entry | None:
        try:
            status = os.stat(os.path.join(self.url, path))
        except FileNotFoundError:
            warnings.warn(f"{path} in volume {self.url} is a link to nothing; it is left out", stacklevel=2)
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return Entry(path, status.st_size, status.st_mtime_ns // 1000)

    def copy(self, entry: Entry, descriptor: int) -> None:
        with self._opened(entry) as source:
            for start, stop in stretches(source, entry.size_bytes):
                os.lseek(source, start, os.SEEK_SET)
                os.lseek(descriptor, start, os.SEEK_SET)
                while start < stop:
                    piece = os.read(source, min(stop - start, CHUNK_BYTES))
                    if not piece:
                        raise OSError(f"{entry.path} ended {entry.size_bytes - start} bytes early")
                    write_all(descriptor, piece)
                    start += len(piece)

    def read(self, entry: Entry, start: int, stop: int) -> bytes:
        with self._opened(entry) as source:
            piece = os.pread(source, stop - start, start)
        if len(piece) != stop - start:
            raise OSError(f"{entry.path}: {len(piece)} of {stop - start} bytes came from {start}")
        return piece

    @contextlib.contextmanager
    def _opened(self, entry: Entry) -> Iterator[int]:
        """The file, which must be the one that was listed."""
        source = os.open(f"{self.url}/{entry.path}", os.O_RDONLY)
        try:
            self._check(entry, source)
            yield source
            self._check(entry, source)  # half of it may be of another version
        finally:
            os.close(source)

    def _check(self, entry: Entry, source: int) -> None:
        status = os.fstat(source)
        if (status.st_size, status.st_mtime_ns // 1000) != (entry.size_bytes, entry.stamp):
            raise changed(self.url, entry, f"{status.st_size} bytes")

    def has_folder(self, path: str) -> bool:
        return os.path.isdir(os.path.join(self.url, path))

    def direct(self, path: str) -> str | None:
        return os.path.join(self.url, path)
