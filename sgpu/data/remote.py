"""A volume: a folder, a mount, or a URL that fsspec can open. List it, and copy one file out of it."""

from __future__ import annotations

import importlib
import os
import pathlib
import stat
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from sgpu.contract.errors import InputError, ListingChangedError, VolumeError

CHUNK_BYTES = 4 << 20
_SLOW_STAT_SECONDS = 1e-4
_STAT_THREADS = 32


@dataclass(frozen=True)
class Entry:
    """A file of a volume.

    Attributes:
        path: relative to the volume, "/" between folders.
        digest: MD5 of the content where the store tells it, else empty.
        stamp: whole microseconds since 1970 of the last change; where the store gives an etag its bits are the part
            below a second. 0 where the store tells nothing. It becomes the modification time of the cached copy.
    """

    path: str
    size_bytes: int
    stamp: int
    digest: bytes = b""


class Volume(Protocol):
    """Calls come in any order and from any thread or process."""

    url: str

    def entries(self) -> Iterator[Entry]:
        """Every file, in any order."""

    def copy(self, entry: Entry, descriptor: int) -> None:
        """Writes the file's bytes to an open file. Raises OSError (worth another try), or a DataError (not)."""

    def direct(self, path: str) -> str | None:
        """A local path of the file itself, where there is one."""


def open_volume(url: str | os.PathLike[str]) -> Volume:
    """The volume at a path or URL.

    Raises:
        VolumeError: it does not exist, is no folder, or its scheme is unknown.
    """
    if not isinstance(url, str | os.PathLike) or not os.fspath(url):
        raise InputError(
            f'url must be a folder or a URL, as "/Volumes/main/default/cats" or "s3://bucket/cats"; found {url!r}'
        )
    text = os.fspath(url)
    scheme, _, rest = text.partition("://")
    if not rest and "://" not in text:
        return LocalVolume(text)
    if scheme in ("file", "local"):
        return LocalVolume(rest)
    # half of what a fetcher for a local folder would load
    store: Any = importlib.import_module("sgpu.data.store")
    opened: Volume = store.FsspecVolume(text)
    return opened


class LocalVolume:
    """A folder of this machine: a disk, or a mount such as /Volumes or /dbfs."""

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
        source = os.open(f"{self.url}/{entry.path}", os.O_RDONLY)
        try:
            status = os.fstat(source)
            if (status.st_size, status.st_mtime_ns // 1000) != (entry.size_bytes, entry.stamp):
                raise changed(self.url, entry, f"{status.st_size} bytes")
            left = entry.size_bytes
            while left:
                piece = os.read(source, min(left, CHUNK_BYTES))
                if not piece:
                    raise OSError(f"{entry.path} ended {left} bytes early")
                write_all(descriptor, piece)
                left -= len(piece)
        finally:
            os.close(source)

    def direct(self, path: str) -> str | None:
        return os.path.join(self.url, path)


def changed(url: str, entry: Entry, now: str) -> ListingChangedError:
    return ListingChangedError(
        f"{entry.path} in volume {url} changed since the volume was listed: listed with {entry.size_bytes} bytes, "
        f"now {now} or a newer version. Files of a volume must not change under a run; start a new run to read "
        "the new version.",
        url=url, path=entry.path, added=[], removed=[], changed=[entry.path],
    )  # fmt: skip


def write_all(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def local_root(url: str) -> pathlib.Path | None:
    """The folder of a local volume, links followed; None for a URL."""
    return None if "://" in url else pathlib.Path(url).resolve()
