"""How much the cache may still take (one small ledger that all processes of the node share), and who lives in it.

The ledger is two numbers under a lock: bytes in the cache, files on their way included, and bytes still on their way.
A process that dies leaves them too high; they are counted anew from the files whenever room runs out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import pathlib
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from typing import NamedTuple

from sgpu.contract import atomic
from sgpu.data import living
from sgpu.data.eviction import CachedFile, choose
from sgpu.data.listing import Listing

STATE = ".state"
_LEDGER = struct.Struct("<qq")
_UNKNOWN = _LEDGER.pack(-1, -1)
_TRUSTED_SECONDS = 0.1  # what the disk has free, while that is far more than what is wanted
_PLENTY_BYTES = 1 << 30
_FULL_SECONDS = 30.0


class _Opened(NamedTuple):
    """The ledger in one process."""

    pid: int
    descriptor: int
    lock: threading.Lock
    numbers: mmap.mmap


class Part(NamedTuple):
    """A file that is about to come: where its bytes go, open for reading and writing. Who asked for it closes it."""

    path: str
    descriptor: int


class Room:
    """Admission to the cache folder `root`.

    Args:
        limit_bytes: of all files under `root`; None: no limit.
        min_free_bytes: of the disk, to be left; None: a tenth of the disk.
    """

    def __init__(self, root: pathlib.Path, limit_bytes: int | None, min_free_bytes: int | None) -> None:
        self.root, self.limit_bytes = root, limit_bytes
        self.state = root / STATE
        for name in ("claims", "parts", "locks", "counters"):
            (self.state / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        disk = os.statvfs(root)
        self.min_free_bytes = disk.f_blocks * disk.f_frsize // 10 if min_free_bytes is None else min_free_bytes
        self._opened: _Opened | None = None
        self._looked = 0.0, 0  # when the disk was asked last (monotonic), and the bytes that were free
        self._full: tuple[float, int] | None = None

    @contextlib.contextmanager
    def _ledger(self) -> Iterator[mmap.mmap]:
        """The ledger, locked. All processes of the node take turns here, so that nothing slow belongs into it."""
        if self._opened is None or self._opened.pid != os.getpid():  # a fork shares its parent's locks: take its own
            self._opened = self._open()
        opened = self._opened
        with opened.lock:
            fcntl.flock(opened.descriptor, fcntl.LOCK_EX)
            try:
                if opened.numbers[:] == _UNKNOWN:
                    used, coming, _ = self._count()
                    self._write(opened.numbers, used, coming)
                yield opened.numbers
            finally:
                fcntl.flock(opened.descriptor, fcntl.LOCK_UN)

    def _open(self) -> _Opened:
        descriptor = os.open(self.state / "usage", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            if os.fstat(descriptor).st_size != _LEDGER.size:
                os.pwrite(descriptor, _UNKNOWN, 0)
                os.ftruncate(descriptor, _LEDGER.size)
            return _Opened(os.getpid(), descriptor, threading.Lock(), mmap.mmap(descriptor, _LEDGER.size))
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _read(self, ledger: mmap.mmap) -> tuple[int, int]:
        used, coming = _LEDGER.unpack_from(ledger)
        return used, coming

    def _write(self, ledger: mmap.mmap, used: int, coming: int) -> None:
        _LEDGER.pack_into(ledger, 0, max(0, used), max(0, coming))

    def used_bytes(self) -> int:
        with self._ledger() as ledger:
            return self._read(ledger)[0]

    def _lack(self, used: int, coming: int, size: int) -> int:
        """Bytes that are wanting for `size` more; 0 or less: it fits."""
        wanted = self.min_free_bytes + coming + size
        now = time.monotonic()
        if now - self._looked[0] > _TRUSTED_SECONDS or wanted > self._looked[1] - _PLENTY_BYTES:
            disk = os.statvfs(self.root)
            self._looked = now, disk.f_bavail * disk.f_frsize
        lack = wanted - self._looked[1]
        return lack if self.limit_bytes is None else max(lack, used + size - self.limit_bytes)

    def reserve(self, size: int, keep_free_bytes: int = 0) -> Part | None:
        """Takes room for a file that is about to come, if need be by evicting others.

        Args:
            keep_free_bytes: refuse if this much would not stay free beside it.

        Returns:
            The part file, of its full size already: who counts the disk anew must see what was promised. None where
            there is no room and nothing may go.
        """
        wanted = size + keep_free_bytes
        if self.limit_bytes is not None and wanted > self.limit_bytes:
            return None
        part = f"{self.state}/parts/{living.new_name()}"
        try:
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as problem:
            if is_disk_full(problem):
                return None
            raise
        admitted = False
        try:
            with self._ledger() as ledger:
                admitted = self._admit(ledger, wanted)
                if admitted:
                    os.ftruncate(descriptor, size)
                    used, coming = self._read(ledger)
                    self._write(ledger, used + size, coming + size)
        finally:
            if not admitted:
                os.close(descriptor)
                os.unlink(part)
        return Part(part, descriptor) if admitted else None

    def _admit(self, ledger: mmap.mmap, wanted: int) -> bool:
        used, coming = self._read(ledger)
        if self._lack(used, coming, wanted) <= 0:
            return True
        if self._known_full(used):
            return False
        used, coming = self._make_room(wanted)
        self._write(ledger, used, coming)
        if self._lack(used, coming, wanted) <= 0:
            return True
        self._full = time.monotonic(), used
        return False

    def _known_full(self, used: int) -> bool:
        return self._full is not None and used >= self._full[1] and time.monotonic() - self._full[0] < _FULL_SECONDS

    def recount(self) -> int:
        """Makes the ledger what is on the disk; for who removed files otherwise. Returns the bytes in use."""
        with self._ledger() as ledger:
            used, coming, _ = self._count()
            self._write(ledger, used, coming)
        return used

    def arrive(self, part: str, path: str, size: int, replaced: int = 0) -> None:
        """Puts a reserved file into its place; `replaced` bytes of an old version go."""
        with self._ledger() as ledger:
            os.replace(part, path)
            used, coming = self._read(ledger)
            self._write(ledger, used - replaced, coming - size)

    def release(self, part: str, size: int) -> None:
        """A reserved file did not come."""
        with self._ledger() as ledger:
            used, coming = self._read(ledger)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            self._write(ledger, used - size, coming - size)

    def removed(self, size: int) -> None:
        self._change(-size, 0)

    def _change(self, used_by: int, coming_by: int) -> None:
        with self._ledger() as ledger:
            used, coming = self._read(ledger)
            self._write(ledger, used + used_by, coming + coming_by)

    def _make_room(self, wanted: int) -> tuple[int, int]:
        living.sweep(self.state / "parts")
        used, coming, files = self._count()
        for file in choose(files, self._lack(used, coming, wanted)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)
            used -= file.size_bytes
        return used, coming

    def _count(self) -> tuple[int, int, list[CachedFile]]:
        """Bytes in the cache, bytes of them still to be written, and the files: from the disk, not from memory."""
        listings = self._live_listings()
        files = [file for volume in self.volumes() for file in _scan(volume, listings.get(volume.name, []))]
        used = coming = 0
        for part in (self.state / "parts").iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = part.stat()
                used += status.st_size
                coming += max(0, status.st_size - status.st_blocks * 512)
        return used + sum(file.size_bytes for file in files), coming, files

    def volumes(self) -> list[pathlib.Path]:
        return [path for path in self.root.iterdir() if path.name != STATE and path.is_dir()]

    # ---- who lives here

    def claim(self, volume: str, listing: Listing, owner: object) -> None:
        """Files of `listing` stay in the cache as long as `owner` and this process live."""
        dead = living.sweep(self.state / "parts")
        if dead:
            self._change(-dead, -dead)
        living.sweep(self.state / "claims")
        living.sweep(self.state / "counters")
        path = self.state / "claims" / living.new_name()
        atomic.write_json(path, {"volume": volume, "listing": str(listing.file)}, durable=False)
        weakref.finalize(owner, living.remove_own, path, os.getpid())

    def claimed(self) -> set[str]:
        """Volumes that a living process uses."""
        return set(self._live_listings())

    def _live_listings(self) -> dict[str, list[Listing]]:
        found: dict[str, dict[str, Listing]] = {}
        for path in (self.state / "claims").iterdir():
            if path.name.startswith(".") or not living.owner_lives(path):
                continue
            told = atomic.read_json(path)
            if told is not None and os.path.exists(told["listing"]):
                found.setdefault(told["volume"], {})[told["listing"]] = Listing(pathlib.Path(told["listing"]))
        return {volume: list(listings.values()) for volume, listings in found.items()}


def _scan(volume: pathlib.Path, listings: list[Listing]) -> Iterator[CachedFile]:
    for folder, _, names in os.walk(volume):
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except FileNotFoundError:
                continue
            relative = os.path.relpath(path, volume)
            version = status.st_size, status.st_mtime_ns // 1000
            resident = any(
                (number := listing.find(relative)) is not None
                and (int(listing.sizes[number]), int(listing.stamps[number])) == version
                for listing in listings
            )
            yield CachedFile(path=path, size_bytes=status.st_size, downloaded_ns=status.st_ctime_ns, resident=resident)


def is_disk_full(problem: OSError) -> bool:
    return problem.errno in (errno.ENOSPC, errno.EDQUOT)
