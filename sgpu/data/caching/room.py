"""How much the cache may still take (one small ledger that all processes of the node share), and who lives in it.

A process that dies leaves the ledger's numbers too high; they are counted anew from the files whenever room runs out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sgpu.contract.errors import InputError
from sgpu.data.caching import tenants
from sgpu.data.caching.eviction import CachedFile, choose
from sgpu.data.caching.ledger import Ledger, Used
from sgpu.data.processes import living
from sgpu.data.processes.forking import anew_in_forks
from sgpu.data.volumes.listing import Listing

STATE = ".state"
_TRUSTED_SECONDS = 0.1  # what the disk has free, while that is far more than what is wanted
_PLENTY_BYTES = 1 << 30
_PLENTY_FOR_SMALL_BYTES = 64 << 20
_FULL_SECONDS = 30.0
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


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
        self._make_folders()
        disk = os.statvfs(root)
        self.min_free_bytes = disk.f_blocks * disk.f_frsize // 10 if min_free_bytes is None else min_free_bytes
        self._looked = 0.0, 0  # when the disk was asked last (monotonic), and the bytes that were free
        self._full: tuple[float, int] | None = None
        self.begin_anew()
        anew_in_forks(self)

    def begin_anew(self) -> None:
        """For a forked process: it shares its parent's locks, and takes its own."""
        self._ledger: Ledger | None = None
        self._opening = threading.Lock()

    def _make_folders(self) -> None:
        for name in ("claims", "parts", "counters"):
            (self.state / name).mkdir(parents=True, exist_ok=True, mode=0o700)

    @contextlib.contextmanager
    def turn(self) -> Iterator[Ledger]:
        """The ledger, locked; within it further turns cost nothing.

        All processes of the node wait for each other here, so that nothing slow belongs into it.
        """
        ledger, is_outer = self._take_turn()
        try:
            if ledger.read() is None:
                ledger.write(self._count()[0])
            yield ledger
        finally:
            ledger.end_turn(is_outer)

    def _take_turn(self) -> tuple[Ledger, bool]:
        while True:
            with self._opening:
                if self._ledger is None:
                    self._make_folders()
                    self._ledger = Ledger(self.state / "usage")
                ledger = self._ledger
            is_outer = ledger.take_turn()
            if not is_outer or not ledger.is_removed():
                return ledger, is_outer
            ledger.end_turn(is_outer)  # the cache was removed under us; all who live in it open the new one
            with self._opening:
                self._ledger = None if self._ledger is ledger else self._ledger

    def used_bytes(self) -> int:
        with self.turn() as ledger:
            return _counted(ledger).total_bytes

    def _lack(self, used: Used, size: int) -> int:
        """Bytes that are wanting for `size` more; 0 or less: it fits."""
        wanted = self.min_free_bytes + used.coming_bytes + size
        now = time.monotonic()
        if now - self._looked[0] > _TRUSTED_SECONDS or wanted > self._looked[1] - _PLENTY_BYTES:
            disk = os.statvfs(self.root)
            self._looked = now, disk.f_bavail * disk.f_frsize
        lack = wanted - self._looked[1]
        return lack if self.limit_bytes is None else max(lack, used.total_bytes + size - self.limit_bytes)

    def has_plenty(self, size: int) -> bool:
        """Whether there is far more room than this: a guess that takes no turn."""
        used = None if self._ledger is None else self._ledger.read()
        return used is not None and self._lack(used, size + _PLENTY_FOR_SMALL_BYTES) <= 0

    def reserve(self, size: int) -> Part | None:
        """Takes room for a file that is about to come, if need be by evicting others.

        Returns:
            The part file, of its full size already: who counts the disk anew must see what was promised. None where
            there is no room and nothing may go.
        """
        return self.reserve_all([size])[0]

    def reserve_all(self, sizes: Sequence[int]) -> list[Part | None]:
        """The same for several files, in one turn."""
        parts, admitted = list[Part | None](), set[Part | None]()
        try:
            for size in sizes:
                parts.append(self._new_part(size))
            with self.turn() as ledger:
                for part, size in zip(parts, sizes, strict=True):
                    if part is not None and self._admit(ledger, size):
                        os.ftruncate(part.descriptor, size)
                        _add(ledger, size, size)
                        admitted.add(part)
        finally:
            for part in parts:
                if part is not None and part not in admitted:
                    os.close(part.descriptor)
                    os.unlink(part.path)
        return [part if part in admitted else None for part in parts]

    def _new_part(self, size: int) -> Part | None:
        """Made before it is this process' turn. None where it is known that there is no room."""
        if self.limit_bytes is not None and size > self.limit_bytes:
            return None
        path = f"{self.state}/parts/{living.new_name()}"
        try:
            try:
                return Part(path, os.open(path, _NEW, 0o600))
            except FileNotFoundError:
                self._make_folders()  # somebody removed the cache under us
                return Part(path, os.open(path, _NEW, 0o600))
        except OSError as problem:
            if is_disk_full(problem):
                return None
            raise

    def _admit(self, ledger: Ledger, wanted: int) -> bool:
        used = _counted(ledger)
        if self._lack(used, wanted) <= 0:
            return True
        if self._known_full(used.total_bytes):
            return False
        used = self._make_room(wanted)
        ledger.write(used)
        if self._lack(used, wanted) <= 0:
            return True
        self._full = time.monotonic(), used.total_bytes
        return False

    def _known_full(self, used: int) -> bool:
        return self._full is not None and used >= self._full[1] and time.monotonic() - self._full[0] < _FULL_SECONDS

    def recount(self) -> int:
        """Makes the ledger what is on the disk; for who removed files otherwise. Returns the bytes in use."""
        with self.turn() as ledger:
            used, _ = self._count()
            ledger.write(used)
        return used.total_bytes

    def arrive(self, part: str, path: str, size: int, replaced: int = 0) -> None:
        """Puts a reserved file into its place; `replaced` bytes of an old version go."""
        with self.turn() as ledger:
            os.replace(part, path)
            _add(ledger, -replaced, -size)

    def release(self, part: str, size: int) -> None:
        """A reserved file did not come."""
        with self.turn() as ledger:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part)
            _add(ledger, -size, -size)

    def removed(self, size: int) -> None:
        with self.turn() as ledger:
            _add(ledger, -size, 0)

    def _make_room(self, wanted: int) -> Used:
        living.sweep(self.state / "parts")
        used, files = self._count()
        for file in choose(files, self._lack(used, wanted)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)
            used = used._replace(total_bytes=used.total_bytes - file.size_bytes)
        return used

    def _count(self) -> tuple[Used, list[CachedFile]]:
        """What is used, and the files: from the disk, not from memory."""
        listings = tenants.live_listings(self.state / "claims")
        files = [
            file for volume in self.volumes() for file in tenants.cached_files(volume, listings.get(volume.name, []))
        ]
        total = coming = 0
        for part in (self.state / "parts").iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = part.stat()
                total += status.st_size
                coming += max(0, status.st_size - status.st_blocks * 512)
        return Used(total + sum(file.size_bytes for file in files), coming), files

    def volumes(self) -> list[pathlib.Path]:
        return [path for path in self.root.iterdir() if path.name != STATE and path.is_dir()]

    # ---- who lives here

    def claim(self, volume: str, listing: Listing, owner: object, *, again: bool) -> None:
        """Files of `listing` stay in the cache as long as `owner` and this process live.

        Args:
            again: another process has claimed them; on a full disk that must do.

        Raises:
            InputError: the disk is full.
        """
        dead = living.sweep(self.state / "parts")
        if dead:
            with self.turn() as ledger:
                _add(ledger, -dead, -dead)
        living.sweep(self.state / "claims")
        living.sweep(self.state / "counters")
        try:
            tenants.move_in(self.state / "claims", volume, listing, owner)
        except OSError as problem:
            if not is_disk_full(problem):
                raise
            if not again:
                raise InputError(
                    f"the disk of cache folder {self.root} is full, also for its own books: {problem.strerror}. Free "
                    "some of it, or name another with cache_dir."
                ) from problem

    def claimed(self) -> set[str]:
        """Volumes that a living process uses."""
        return set(tenants.live_listings(self.state / "claims"))


def _counted(ledger: Ledger) -> Used:
    used = ledger.read()
    assert used is not None, "a turn begins with a count"
    return used


def _add(ledger: Ledger, total_bytes: int, coming_bytes: int) -> None:
    used = _counted(ledger)
    ledger.write(Used(used.total_bytes + total_bytes, used.coming_bytes + coming_bytes))


def is_disk_full(problem: OSError) -> bool:
    return problem.errno in (errno.ENOSPC, errno.EDQUOT)
