"""The node's copies of a volume's files: each fetched once, whole or absent, under its own relative path."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import stat
import warnings

from sgpu import runtime
from sgpu.contract.errors import FetchError
from sgpu.contract.failpoint import failpoint
from sgpu.data.caching.private import PrivateCopies
from sgpu.data.caching.reading import TRIES, Reading
from sgpu.data.caching.room import Part, Room, is_disk_full
from sgpu.data.caching.sums import Sum, Sums, crc_of_path, key_of, suspect_before_ns
from sgpu.data.measuring.counters import Counters
from sgpu.data.processes.single_flight import SingleFlight
from sgpu.data.volumes.entry import Entry, Volume, changed
from sgpu.data.volumes.listing import Listing


class Cache:
    """Files of one volume and listing.

    A process that dies at any moment leaves no half file: bytes go into a part file, which is renamed once it is whole.
    Two processes do not fetch the same file at the same time where locks work; elsewhere they may, and
    each still publishes a whole file.
    """

    def __init__(self, volume: Volume, listing: Listing, folder: pathlib.Path, room: Room, counters: Counters) -> None:
        self.volume, self.listing, self.folder = volume, listing, folder
        self.room, self.counters, self.reading = room, counters, Reading(volume, counters)
        self.private = PrivateCopies(folder.name, volume.url)
        self.flights = SingleFlight(f"{room.state}/flights")
        self._made: set[str] = set()
        self.sums, self._suspect_before_ns = Sums(room.state / "sums"), suspect_before_ns(room.state)
        self._known: dict[int, Sum] | None = None
        self._warned = False

    def local(self, number: int) -> str:
        """Where the file is, once it is here."""
        return f"{self.folder}/{self.listing.path(number)}"

    def has(self, number: int) -> bool:
        """Whether the file is here in the listed version."""
        return self.is_here(self.local(number), number)

    def is_here(self, path: str, number: int) -> bool:
        """The same where `path` is what `local` gives."""
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if (status.st_size, status.st_mtime_ns // 1000) != self.listing.version(number):
            return False
        return status.st_ctime_ns >= self._suspect_before_ns or self._survived(path, number, status)

    def _survived(self, path: str, number: int, status: os.stat_result) -> bool:
        """Whether a file of an earlier boot of the machine still has the bytes that came; if not it goes."""
        entry = self.listing.entry(number)
        if self._known is None:
            self._known = self.sums.load()
        try:
            if self._known.get(self.key(entry)) == Sum(entry.size_bytes, entry.stamp, crc_of_path(path)):
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # its ctime is of this boot now
                return True
            os.unlink(path)
        except FileNotFoundError:
            return False
        self.room.removed(status.st_size)
        return False

    def key(self, entry: Entry) -> int:
        """Of its checksum."""
        return key_of(self.folder.name, entry.path)

    def at_hand(self, number: int) -> str | None:
        """What `obtain` gives, where the file is here."""
        path = self.local(number)
        if not self.is_here(path, number):
            return None
        self.counters.add(requests=1)
        return path

    def obtain(self, number: int) -> str:
        """A local path of the file, fetched now if need be. It stays while this process' data set lives.

        Raises:
            FetchError: it could not be read after several tries.
            ListingChangedError: it is not the file that was listed.
        """
        if (path := self.at_hand(number)) is not None:
            return path
        self.counters.add(requests=1)
        path = self.local(number)
        with self.flights.only_one(path):
            if self.is_here(path, number):
                self.counters.add(waits=1)
                return path
            entry = self.listing.entry(number)
            if self._brought(entry, path, TRIES):
                return path
        return self._around(entry)

    def prefetch(self, number: int) -> bool:
        """Brings the file here ahead of its use; False where the cache has no room. Errors are left to `obtain`."""
        return self.has(number) or self.bring(number) is not None

    def bring(self, number: int, tries: int = TRIES) -> int | None:
        """The same for a file that was looked for already. Returns the bytes that came; None: there is no room."""
        path = self.local(number)
        with self.flights.only_one(path):
            if self.is_here(path, number):
                return 0
            entry = self.listing.entry(number)
            return entry.size_bytes if self._brought(entry, path, tries) else None

    def _brought(self, entry: Entry, path: str, tries: int) -> bool:
        """False: the cache has no room."""
        try:
            try:
                return self._reserved_and_brought(entry, path, tries)
            except FileNotFoundError:  # somebody removed the whole cache meanwhile
                return self._reserved_and_brought(entry, path, tries)
        except OSError as problem:
            if not is_disk_full(problem):
                raise
            return False

    def _reserved_and_brought(self, entry: Entry, path: str, tries: int) -> bool:
        part = self.room.reserve(entry.size_bytes)
        if part is not None:
            self._bring(entry, path, part, tries)
        return part is not None

    def _bring(self, entry: Entry, path: str, part: Part, tries: int) -> None:
        """Fetches into the room that was reserved."""
        try:
            try:
                crc = self.reading.copy(entry, part.descriptor, tries)
            finally:
                os.close(part.descriptor)
            self.sums.add_all([(self.key(entry), Sum(entry.size_bytes, entry.stamp, crc))])
            self.publish(part, path, entry.size_bytes)
        except BaseException:
            self.room.release(part.path, entry.size_bytes)
            raise

    def publish(self, part: Part, path: str, size: int, *, is_new: bool = False) -> None:
        """Puts a whole file into its place, in which there is nothing if it `is_new`."""
        folder = os.path.dirname(path)
        replaced = 0
        if folder not in self._made:
            replaced = _make_folder(folder, self.folder)
            self._made.add(folder)
        if not is_new:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(path)
                replaced += _remove_tree(path) if stat.S_ISDIR(status.st_mode) else status.st_size
        failpoint("data.publish")
        try:
            self.room.arrive(part.path, path, size, replaced)
        except FileNotFoundError:  # somebody removed the folder
            _make_folder(folder, self.folder)
            self.room.arrive(part.path, path, size, replaced)

    # ---- around the cache

    def _around(self, entry: Entry) -> str:
        """Serves a file for which the cache has no room: in place, or by a private copy that soon goes."""
        self.counters.add(bypassed=1)
        self.warn_full()
        direct = self.volume.direct(entry.path)
        if direct is not None:
            return self._in_place(entry, direct)
        path = self.private.place(entry.path)
        try:
            self._download_privately(entry, path)
        except OSError as problem:
            raise FetchError(
                f"there is no room for {entry.path} of volume {self.volume.url} ({entry.size_bytes} bytes), neither in "
                f"the cache {self.room.root} nor beside it in {os.path.dirname(path)}: {problem.strerror}. Free some "
                "disk, or name a larger one with cache_dir and TMPDIR.",
                url=self.volume.url, path=entry.path, rank=runtime.rank(),
            ) from problem  # fmt: skip
        self.private.keep(path)
        return path

    def _download_privately(self, entry: Entry, path: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, entry.size_bytes)
            self.reading.copy(entry, descriptor)
        finally:
            os.close(descriptor)

    def _in_place(self, entry: Entry, direct: str) -> str:
        try:
            with open(direct, "rb") as file:
                status = os.fstat(file.fileno())
        except OSError as problem:
            raise self.reading.failed(entry, problem, 1) from problem
        if (status.st_size, status.st_mtime_ns // 1000) != (entry.size_bytes, entry.stamp):
            raise changed(self.volume.url, entry, f"{status.st_size} bytes")
        return direct

    def warn_full(self) -> None:
        if self._warned:
            return
        self._warned = True
        limit = "no limit" if self.room.limit_bytes is None else f"a limit of {self.room.limit_bytes} bytes"
        warnings.warn(
            f"the cache {self.room.root} has no room left ({limit}, and {self.room.min_free_bytes} bytes of its "
            f"disk are to stay free); the rest of {self.volume.url} is read around it, each time anew. Raise "
            "cache_limit_bytes, lower min_free_disk_bytes, or name a larger disk with cache_dir.",
            stacklevel=3,
        )


def _make_folder(folder: str, root: pathlib.Path) -> int:
    """Returns the bytes of a file of an older version of the volume that stood in its place."""
    removed = 0
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        above = pathlib.Path(folder)
        while above != root and not above.is_file():
            above = above.parent
        with contextlib.suppress(FileNotFoundError):
            size = above.stat().st_size
            above.unlink()
            removed = size
        os.makedirs(folder, mode=0o700, exist_ok=True)
    return removed


def _remove_tree(path: str) -> int:
    """Removes a folder of an older version of the volume where there is a file now. Returns its bytes."""
    total = sum(os.lstat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(path) for name in names)
    shutil.rmtree(path, ignore_errors=True)
    return total
