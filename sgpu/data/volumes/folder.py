"""A volume that is a folder of this machine: a disk, or a mount such as /Volumes or /dbfs."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import time
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import starmap
from typing import NamedTuple

from crc32c import crc32c

from sgpu.contract.errors import VolumeError
from sgpu.data.volumes.entry import CHUNK_BYTES, Entry, changed, write_all
from sgpu.data.volumes.holes import stretches

_SLOW_SCAN_SECONDS = 1e-4  # for each file of a folder
_SLOW_QUESTION_SECONDS = 2e-5  # about a file: ten times what a disk of this machine takes
_PROBED = 16
_THREADS = 32
_A_FEW = 8  # files that a thread asks for, one after the other
_Files = list[tuple[str, "os.DirEntry[str]"]]


class _Folder(NamedTuple):
    """What a folder holds. `identity`: of the folder itself, by whatever links it was reached."""

    identity: tuple[int, int]
    inside: list[str]
    files: _Files

    def entered(self, folders: list[str], seen: set[tuple[int, int]]) -> _Files:
        """Its files, once its folders are the next to be entered; none where the walk has been here before."""
        if self.identity in seen:
            return []
        seen.add(self.identity)
        folders.extend(sorted(self.inside, reverse=True))
        return self.files


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
        folders, seen = [""], set[tuple[int, int]]()
        while folders:
            began = time.perf_counter()
            found = self._scan(folders.pop())
            slow = time.perf_counter() - began > _SLOW_SCAN_SECONDS * (10 + len(found.inside) + len(found.files))
            files = found.entered(folders, seen)
            head, fastest = self._timed(files[:_PROBED])
            yield from filter(None, head)
            if slow or fastest > _SLOW_QUESTION_SECONDS:
                yield from self._many_at_a_time(folders, files[_PROBED:], seen)
                return
            yield from filter(None, starmap(self._entry, files[_PROBED:]))

    def _timed(self, files: _Files) -> tuple[list[Entry | None], float]:
        """With the seconds of the fastest answer: on a busy machine some take long on any disk."""
        found, fastest = [], math.inf
        for file in files:
            began = time.perf_counter()
            found.append(self._entry(*file))
            fastest = min(fastest, time.perf_counter() - began)
        return found, fastest if found else 0.0

    def _many_at_a_time(self, folders: list[str], files: _Files, seen: set[tuple[int, int]]) -> Iterator[Entry]:
        """A mount answers many questions at a time, each slowly."""
        with ThreadPoolExecutor(_THREADS) as pool:
            asked: deque[Future[list[Entry | None]]] = deque()
            for some in self._scanned_ahead(pool, folders, files, seen):
                asked.append(pool.submit(lambda some: list(starmap(self._entry, some)), some))
                if len(asked) > 4 * _THREADS:
                    yield from filter(None, asked.popleft().result())
            for answers in asked:
                yield from filter(None, answers.result())

    def _scanned_ahead(
        self, pool: ThreadPoolExecutor, folders: list[str], files: _Files, seen: set[tuple[int, int]]
    ) -> Iterator[_Files]:
        """Files, a few at a time, from here on, in the order of a walk by one thread."""
        scans = [pool.submit(self._scan, folder) for folder in folders]
        while True:
            yield from (files[start : start + _A_FEW] for start in range(0, len(files), _A_FEW))
            if not scans:
                return
            inside: list[str] = []
            files = scans.pop().result().entered(inside, seen)
            scans.extend(pool.submit(self._scan, folder) for folder in inside)

    def _scan(self, folder: str) -> _Folder:
        here, above = (f"{self.url}/{folder}", f"{folder}/") if folder else (self.url, "")
        inside: list[str] = []
        files: _Files = []
        try:
            status = os.stat(here)
            with os.scandir(here) as scan:
                for item in scan:
                    if item.is_dir():
                        inside.append(above + item.name)
                    else:
                        files.append((above + item.name, item))
        except OSError as problem:
            raise VolumeError(
                f"folder {here} of volume {self.url} cannot be read: {problem.strerror}. Check its permissions.",
                url=self.url,
            ) from problem
        return _Folder((status.st_dev, status.st_ino), inside, files)

    def _entry(self, path: str, item: os.DirEntry[str]) -> Entry | None:
        try:
            status = item.stat()
        except FileNotFoundError:
            warnings.warn(f"{path} in volume {self.url} is a link to nothing; it is left out", stacklevel=2)
            return None
        if not stat.S_ISREG(status.st_mode):
            return None
        return Entry(path, status.st_size, status.st_mtime_ns // 1000)

    def copy(self, entry: Entry, descriptor: int) -> int | None:
        if entry.size_bytes < CHUNK_BYTES:
            body = self.body(entry)
            os.lseek(descriptor, 0, os.SEEK_SET)
            write_all(descriptor, body)
            return crc32c(body)
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
        return None

    def body(self, entry: Entry) -> bytes:
        """With few calls, for each of which other threads may take Python's lock."""
        source = os.open(f"{self.url}/{entry.path}", os.O_RDONLY)
        try:
            body = os.read(source, entry.size_bytes)
            while 0 < len(body) < entry.size_bytes and (piece := os.read(source, entry.size_bytes - len(body))):
                body += piece
            self._check(entry, source)
        finally:
            os.close(source)
        if len(body) != entry.size_bytes:
            raise OSError(f"{entry.path} ended {entry.size_bytes - len(body)} bytes early")
        return body

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
