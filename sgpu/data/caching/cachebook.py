"""What is in a cache folder, whether it is whole, and how to be rid of it: for people, not for runs."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sgpu.contract.errors import InputError
from sgpu.data.caching.room import STATE, Room
from sgpu.data.caching.sums import Sums, crc_of_path, key_of
from sgpu.data.processes import living
from sgpu.data.volumes.listing import Listing


@dataclass(frozen=True, kw_only=True)
class CachedVolume:
    """The copies of one volume's files.

    Attributes:
        name: of its folder in the cache.
        url: of the volume; None where no listing of it is kept any more.
        newest_seconds: when the last file came, seconds since 1970; 0 without files.
        in_use: a living process of this machine reads it.
    """

    name: str
    url: str | None
    files: int
    size_bytes: int
    newest_seconds: float
    in_use: bool


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What `verify` found.

    Attributes:
        whole: files whose bytes are those that came.
        damaged: (volume, path in it) of the others.
        unknown: files that came before the cache kept checksums.
    """

    whole: int
    damaged: tuple[tuple[str, str], ...]
    unknown: int


class CacheBook:
    """A cache folder.

    Raises:
        InputError: there is none.
    """

    def __init__(self, root: pathlib.Path) -> None:
        if not (root / STATE).is_dir():
            raise InputError(f"there is no cache in {root}; expected the cache_dir of a data set, or its default")
        self.root = root
        self._room = Room(root, None, 0)

    def volumes(self) -> list[CachedVolume]:
        """Sorted by name."""
        claimed = self._room.claimed()
        return [self._about(folder, folder.name in claimed) for folder in sorted(self._room.volumes())]

    def _about(self, folder: pathlib.Path, in_use: bool) -> CachedVolume:
        files, size, newest = 0, 0, 0.0
        for path in _files(folder):
            status = os.stat(path)
            files, size, newest = files + 1, size + status.st_size, max(newest, status.st_ctime)
        return CachedVolume(
            name=folder.name, url=self._url(folder.name), files=files, size_bytes=size, newest_seconds=newest,
            in_use=in_use,
        )  # fmt: skip

    def _url(self, name: str) -> str | None:
        for listing in (self.root / STATE / "listings").glob(f"{name}-*/*.listing"):
            return Listing(listing).url
        return None

    def verify(self, *, remove: bool = False) -> Verified:
        """Compares every file with the checksum that it came with.

        Args:
            remove: damaged files go, and come anew when they are wanted.
        """
        known = Sums(self.root / STATE / "sums").load()
        whole, unknown, damaged = 0, 0, []
        for folder in self._room.volumes():
            for path in _files(folder):
                relative, status = os.path.relpath(path, folder), os.stat(path)
                told = known.get(key_of(folder.name, relative))
                if told is None:
                    unknown += 1
                elif (told.size_bytes, told.stamp) == (status.st_size, status.st_mtime_ns // 1000) and (
                    told.crc == crc_of_path(path)
                ):
                    whole += 1
                else:
                    damaged.append((folder.name, relative))
                    if remove:
                        os.unlink(path)
        if damaged and remove:
            self._room.recount()
        return Verified(whole=whole, damaged=tuple(sorted(damaged)), unknown=unknown)

    def clear(self, names: Sequence[str] = (), *, dry_run: bool = False) -> list[CachedVolume]:
        """Removes what is kept of these volumes; without names, of all that nobody uses.

        Raises:
            InputError: a name is not there, or a living process reads that volume.
        """
        there = {volume.name: volume for volume in self.volumes()}
        unknown = [name for name in names if name not in there]
        if unknown:
            raise InputError(
                f"the cache {self.root} has no volume {', '.join(unknown)}; it has {', '.join(there) or 'none'}"
            )
        used = [name for name in names if there[name].in_use]
        if used:
            raise InputError(
                f"{', '.join(used)} is being read by a process of this machine, whose files must stay; "
                "end it first, or leave the name out"
            )
        gone = [there[name] for name in names] if names else [each for each in there.values() if not each.in_use]
        if not dry_run:
            for volume in gone:
                shutil.rmtree(self.root / volume.name, ignore_errors=True)
                for shelf in (self.root / STATE / "listings").glob(f"{volume.name}-*"):
                    shutil.rmtree(shelf, ignore_errors=True)
            for folder in ("parts", "claims", "counters"):
                living.sweep(self.root / STATE / folder)
            self._room.recount()
        return gone

    @property
    def size_bytes(self) -> int:
        """Of all files, from the disk."""
        return self._room.recount()


def _files(folder: pathlib.Path) -> Iterator[str]:
    for above, _, names in os.walk(folder):
        for name in names:
            yield os.path.join(above, name)
