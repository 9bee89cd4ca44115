"""Counts that several processes add to and one reads: a folder with a small mapped file a process."""

from __future__ import annotations

import mmap
import os
import pathlib
import struct
import threading
from dataclasses import dataclass

from sgpu.data.processes.forking import anew_in_forks

_FIELDS = ("requests", "downloads", "downloaded_bytes", "retries", "bypassed", "waits")
_PLACES = {name: place for place, name in enumerate(_FIELDS)}
_FORMAT = struct.Struct(f"={len(_FIELDS)}q")


@dataclass(frozen=True, kw_only=True)
class CacheCounts:
    """What a cache did.

    Attributes:
        requests: files asked for by who uses them.
        downloads: files brought here, ahead of time or on demand.
        waits: requests that found their file on its way.
        bypassed: requests served around the cache, for lack of room.
    """

    requests: int = 0
    downloads: int = 0
    downloaded_bytes: int = 0
    retries: int = 0
    bypassed: int = 0
    waits: int = 0

    def plus(self, other: CacheCounts, sign: int = 1) -> CacheCounts:
        return CacheCounts(**{name: getattr(self, name) + sign * getattr(other, name) for name in _FIELDS})


class Counters:
    """Adds up over processes and threads; each process writes its own file."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.begin_anew()
        anew_in_forks(self)

    def begin_anew(self) -> None:
        """For a forked process: it counts in a file of its own."""
        self._mine: tuple[memoryview, threading.Lock] | None = None
        self._opening = threading.Lock()

    def __getstate__(self) -> pathlib.Path:
        return self.folder

    def __setstate__(self, folder: pathlib.Path) -> None:
        self.__init__(folder)  # type: ignore[misc]

    def _open(self) -> tuple[memoryview, threading.Lock]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.folder / str(os.getpid()), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                if os.fstat(descriptor).st_size != _FORMAT.size:
                    os.pwrite(descriptor, bytes(_FORMAT.size), 0)  # on a full disk a page without memory would kill us
                mapped = mmap.mmap(descriptor, _FORMAT.size)
            except (OSError, ValueError):
                mapped = mmap.mmap(-1, _FORMAT.size)  # nobody reads these: only counts are lost
            return memoryview(mapped).cast("q"), threading.Lock()
        finally:
            os.close(descriptor)

    def _opened(self) -> tuple[memoryview, threading.Lock]:
        with self._opening:  # who opened it a second time would begin at 0 again
            if self._mine is None:
                self._mine = self._open()
            return self._mine

    def add(self, **amounts: int) -> None:
        """Adds to the fields of `CacheCounts` by name."""
        numbers, lock = self._mine or self._opened()
        with lock:
            for name, amount in amounts.items():
                numbers[_PLACES[name]] += amount

    def total(self) -> CacheCounts:
        sums = [0] * len(_FIELDS)
        try:
            files = list(self.folder.iterdir())
        except FileNotFoundError:
            files = []
        for file in files:
            content = file.read_bytes()
            if len(content) == _FORMAT.size:
                sums = [a + b for a, b in zip(sums, _FORMAT.unpack(content), strict=True)]
        return CacheCounts(**dict(zip(_FIELDS, sums, strict=True)))
