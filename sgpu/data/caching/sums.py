"""Checksums of the cache's files, and which of them a crash of the machine may have damaged.

A copy is renamed into its place without waiting for the disk (that would take 12 times as long), so that a machine that
loses its power may keep a file of the right size and time with other bytes. Each download leaves its CRC-32C here, and
files older than this boot are compared with it when they are first used.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import struct
import time
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from sgpu.contract import atomic
from sgpu.data.volumes.entry import CHUNK_BYTES
from sgpu.data.volumes.holes import crc_after_zeros, stretches

_RECORD = np.dtype([("key", "<u8"), ("size", "<i8"), ("stamp", "<i8"), ("crc", "<u4"), ("unused", "<u4")])
_LINE = struct.Struct("<QqqII")
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
_COMPACT_BYTES = 64 << 20


class Sum(NamedTuple):
    """What a file was when it came."""

    size_bytes: int
    stamp: int
    crc: int


def key_of(volume: str, path: str) -> int:
    name = f"{volume}/{path}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


class Sums:
    """An append-only file of records; the last one of a key counts."""

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file
        self._opened: list[int] = []  # descriptors, the newest first: another thread may still write to an older one
        weakref.finalize(self, _close, self._opened).atexit = False

    def add_all(self, found: Iterable[tuple[int, Sum]]) -> None:
        """One write of 32 bytes a file to the end: whole or absent, whoever else writes."""
        lines = b"".join(_LINE.pack(key, *told, 0) for key, told in found)
        if not self._opened or os.fstat(self._opened[0]).st_nlink == 0:  # somebody compacted or removed the file
            self._opened.insert(0, os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        os.write(self._opened[0], lines)

    def load(self) -> dict[int, Sum]:
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            return {}
        records = np.frombuffer(content[: len(content) - len(content) % _RECORD.itemsize], _RECORD)
        return {int(key): Sum(int(size), int(stamp), int(crc)) for key, size, stamp, crc, _ in records}

    def compact(self) -> None:
        """Leaves one record a key, once the file is large. One that comes meanwhile may go."""
        if self.file.exists() and self.file.stat().st_size > _COMPACT_BYTES:
            kept = b"".join(_LINE.pack(key, *found, 0) for key, found in self.load().items())
            atomic.write_bytes(self.file, kept, durable=False)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def crc_of(descriptor: int) -> int:
    """Of a whole open file, from its beginning."""
    size = os.fstat(descriptor).st_size
    crc, at = 0, 0
    for start, stop in stretches(descriptor, size):
        crc, at = crc_after_zeros(crc, start - at), start
        while at < stop and (piece := os.pread(descriptor, min(stop - at, CHUNK_BYTES), at)):
            crc, at = crc32c(piece, crc), at + len(piece)
    return crc_after_zeros(crc, size - at)


def crc_of_path(path: str | os.PathLike[str]) -> int:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return crc_of(descriptor)
    finally:
        os.close(descriptor)


def suspect_before_ns(state: pathlib.Path) -> int:
    """Files that came before this moment (ns since 1970) came in an earlier boot of the machine; 0: none did.

    A boot that the cache does not know begins when it is first asked about, unless the cache is new.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
    except OSError:  # not Linux
        return 0
    folder = state / "boots"
    folder.mkdir(exist_ok=True, mode=0o700)
    known = atomic.read_json(folder / boot)
    if known is None:
        known = {"since_ns": time.time_ns() if any(folder.iterdir()) else 0}
        Sums(state / "sums").compact()
        atomic.write_json(folder / boot, known, durable=False)
    return int(known["since_ns"])
