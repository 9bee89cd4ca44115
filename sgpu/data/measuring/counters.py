"""Counts that several processes add to and one reads: a folder with a small mapped file a process."""

from __future__ import annotations

import mmap
import os
import pathlib
import struct
import threading
from dataclasses import dataclass

_FIELDS = ("requests", "downloads", "downloaded_bytes", "retries", "bypassed", "waits")
_PLACES = {name: place for place, name in enumerate(_FIELDS)}
_FORMAT = struct.Struct(f"={len(_FIELDS)}q")

_opening = threading.Lock()


def _forked() -> None:
    global _opening
    _opening = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_forked)


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


class Counters:
    """Adds up over processes and threads; each process writes its own file."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._mine: tuple[int, memoryview, threading.Lock] | None = None

    def __getstate__(self) -> pathlib.Path:
        return self.folder

    def __setstate__(self, folder: pathlib.Path) -> None:
        self.folder, self._mine = folder, None

    def _open(self) -> tuple[int, memoryview, threading.Lock]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.folder / str(os.getpid()), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                if os.fstat(descriptor).st_size != _FORMAT.size:
                    os.pwrite(descriptor, bytes(_FORMAT.size), 0)  # on a full disk a page without memory would kill us
                mapped = mmap.mmap(descriptor, _FORMAT.size)
            except (OSError, ValueError):
                mapped = mmap.mmap(-1, _FORMAT.size)  # nobody reads these: only counts are lost
            return os.getpid(), memoryview(mapped).cast("q"), threading.Lock()
        finally:
            os.close(descriptor)

    def _opened(self) -> tuple[int, memoryview, threading.Lock]:
        with _opening:  # who opened it a second time would begin at 0 again
            if self._mine is None or self._mine[0] != os.getpid():
                self._mine = self._open()
            return self._mine

    def add(self, **amounts: int) -> None:
        """Adds to the fields of `CacheCounts` by name."""
        mine = self._mine
        _, numbers, lock = mine if mine is not None and mine[0] == os.getpid() else self._opened()
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
