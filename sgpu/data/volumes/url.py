"""A volume behind a URL, by fsspec."""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from crc32c import crc32c

from sgpu.contract.errors import DataError, VolumeError
from sgpu.data.volumes.entry import CHUNK_BYTES, Entry, changed
from sgpu.data.volumes.quick_s3 import Access, QuickS3, reader_of
from sgpu.data.volumes.versions import Facts, digest_of, etag_of, is_version, stamp_of, sum_of

if TYPE_CHECKING:
    from sgpu.data.volumes.connection import Connection

RANGE_BYTES = 8 << 20  # a larger file comes in pieces of this size
STALL_SECONDS = 60.0  # for one request of at most so many bytes
_RANGES_AT_ONCE = 4
_ASKING_THREADS = 32
_TOLD = 5


class UrlVolume:
    """Whatever fsspec reaches: s3://, gs://, abfs://, hf://, memory:// (this process and its forks only).

    What comes is of the version that was listed: most stores name it in each reply, the others are asked afterwards.

    Args:
        credentials: see `Connection`.
        access: with which `hasten` makes it read at once, without a file system, until that fails; None: what the
            file system of this process has.
    """

    def __init__(self, url: str, credentials: str | None = None, access: Access | None = None) -> None:
        self.url = url.rstrip("/")
        self._credentials, self._access = credentials, access
        self._given: QuickS3 | None = None
        self._hastens = self._gave = False
        self._lock = threading.Lock()
        self._opened: Connection | None = None
        if access is None:
            self._connection.open()

    @property
    def _connection(self) -> Connection:
        """Opened when it is wanted: to load a file system takes longer than to read hundreds of files by obstore."""
        if self._opened is None:
            with self._lock:
                if self._opened is None:
                    loaded: Any = importlib.import_module("sgpu.data.volumes.connection")
                    opened: Connection = loaded.Connection(self.url, self._credentials)
                    if self._hastens:
                        opened.hasten(STALL_SECONDS)
                    self._opened = opened
        return self._opened

    # ---- what there is

    def entries(self) -> Iterator[Entry]:
        try:
            root, found = self._connection.files()
        except VolumeError:
            raise
        except FileNotFoundError as problem:
            raise self._absent() from problem
        except Exception as problem:  # each store has errors of its own
            raise self._unlisted(problem) from problem
        if not found.keys() - {root}:
            raise self._absent()
        files = {name: facts for name, facts in found.items() if facts.get("type", "file") == "file"}
        unsized = [name for name, facts in files.items() if facts.get("size") is None]
        if unsized:  # an HTTP server's page of links names the files only
            with ThreadPoolExecutor(_ASKING_THREADS) as pool:
                files.update(zip(unsized, pool.map(self._info, unsized), strict=True))
        unversioned = 0
        for name, facts in files.items():
            path = name[len(root) :].removeprefix("/")
            if path and not path.endswith("/"):
                size, commit = int(facts.get("size") or 0), facts.get("commit", "")
                entry = Entry(path, size, stamp_of(facts), digest_of(facts), etag_of(facts), commit)
                unversioned += not (entry.stamp or entry.digest)
                yield entry
        if unversioned:
            warnings.warn(
                f"{unversioned} of {len(files)} files of volume {self.url} come without a version (neither ETag nor "
                "time of change): one that is replaced by another of the same size cannot be told from it, nor can "
                "its copy in the cache. Serve them with an ETag or Last-Modified, or see that they never change.",
                stacklevel=2,
            )

    def _unlisted(self, problem: Exception) -> VolumeError:
        told = " ".join(str(problem).split())  # some stores answer in pages
        return VolumeError(f"volume {self.url} cannot be listed: {type(problem).__name__}: {told}", url=self.url)

    def _absent(self) -> VolumeError:
        try:
            why = self._connection.why_nothing()
        except Exception as problem:
            raise self._unlisted(problem) from problem
        if why:
            return VolumeError(f"volume {self.url} {why}", url=self.url)
        above, names = self._connection.seen_above()
        some = ", ".join(repr(name) for name in sorted(names)[:_TOLD])
        return VolumeError(
            f"volume {self.url} does not exist or holds nothing. Expected a folder or prefix with files; check its "
            "name and your credentials."
            + (
                f" There are {len(names)} names in {repr(above) if above else 'the store'}, as {some}." if names else ""
            ),
            url=self.url,
        )

    def _info(self, name: str) -> Facts:
        try:
            facts: Facts = self._connection.asked(lambda filesystem, _: filesystem.info(name))
        except Exception as problem:
            raise VolumeError(f"{name} in volume {self.url} cannot be read: {problem!r}", url=self.url) from problem
        if facts.get("size") is None:
            raise VolumeError(
                f"{name} in volume {self.url}: its size is not told, and without it no copy can be checked. Serve the "
                "files with a Content-Length, or copy them to a folder or an object store.",
                url=self.url,
            )
        return facts

    def has_folder(self, path: str) -> bool:
        try:
            return self._connection.has_folder(path)
        except VolumeError:
            raise
        except Exception as problem:
            raise VolumeError(f"volume {self.url} cannot be reached: {problem!r}", url=self.url) from problem

    def direct(self, path: str) -> str | None:
        return None

    # ---- bytes

    def copy(self, entry: Entry, descriptor: int) -> int | None:
        if entry.size_bytes <= RANGE_BYTES:
            body = self.body(entry)
            _pwrite_all(descriptor, body, 0)
            return crc32c(body)
        told = self._copy_in_ranges(entry, descriptor)
        self._check_bytes(entry, lambda: _pieces_of(descriptor), told)
        return None

    def body(self, entry: Entry) -> bytes:
        body, told = self._piece(entry, None, None)
        if len(body) != entry.size_bytes:
            self._check(entry)
            raise OSError(f"{entry.path}: {len(body)} of {entry.size_bytes} bytes came")
        self._check_bytes(entry, lambda: [body], told)
        return body

    def _check_bytes(self, entry: Entry, pieces: Callable[[], Iterable[bytes]], told: bool) -> None:
        """Whether what came is what was listed. `told`: the store said so with each part."""
        expected = sum_of(entry)
        if expected is not None:
            hashed, digest = expected
            for piece in pieces():
                hashed.update(piece)
            if hashed.digest() != digest:
                self._check(entry)
                raise OSError(f"{entry.path}: the bytes that came have another checksum than the store tells")
        elif not told:
            self._check(entry)

    def _copy_in_ranges(self, entry: Entry, descriptor: int) -> bool:
        """A large file by several requests at a time, each of which can fail or stall by itself."""

        def bring(start: int) -> bool:
            body, told = self._range(entry, start, min(entry.size_bytes, start + RANGE_BYTES))
            _pwrite_all(descriptor, body, start)
            return told

        with ThreadPoolExecutor(_RANGES_AT_ONCE) as pool:
            return all(list(pool.map(bring, range(0, entry.size_bytes, RANGE_BYTES))))

    def read(self, entry: Entry, start: int, stop: int) -> bytes:
        body, told = self._range(entry, start, stop)
        if not told:
            self._check(entry)
        return body

    def _range(self, entry: Entry, start: int, stop: int) -> tuple[bytes, bool]:
        body, told = self._piece(entry, start, stop)
        if len(body) == entry.size_bytes > stop - start:  # a server that knows no ranges
            body = body[start:stop]
        if len(body) != stop - start:
            self._check(entry)
            raise OSError(f"{entry.path}: {len(body)} of {stop - start} bytes came from {start}")
        return body, told

    def _piece(self, entry: Entry, start: int | None, stop: int | None) -> tuple[bytes, bool]:
        """Bytes, and whether the store told with them that they are of the version that was listed."""
        answer = None if self._given is None else self._given.ask(entry.path, start, stop)
        try:
            if answer is None:
                answer = self._connection.answer(entry, start, stop, STALL_SECONDS)
        except (OSError, DataError):
            raise
        except Exception as problem:
            raise OSError(f"{type(problem).__name__}: {problem}") from problem
        same = None if answer.facts is None else is_version(entry, answer.facts)
        if same is False:
            raise changed(self.url, entry, "the same number of bytes")
        return answer.body, same is True

    def hasten(self) -> None:
        """For a process that does not fork from now on: reads by faster means where there are any."""
        if self._hastens:
            return
        self._hastens, self._lock = True, threading.Lock()  # a fork may have copied one that is held
        if self._access is not None:
            self._given, self._access = reader_of(self._access, None, STALL_SECONDS), None
        if self._opened is not None:
            self._opened.hasten(STALL_SECONDS)

    @property
    def quick(self) -> QuickS3 | None:
        """What reads now, before file systems do."""
        if self._given is not None and not self._given.gave_up:
            return self._given
        return None if self._opened is None else self._opened.quick

    def access(self) -> Access | None:
        """With which another process can read. Secret."""
        found = self._connection.access()
        self._gave = found is not None
        return found

    @property
    def others_are_quicker(self) -> bool:
        """They read by obstore, and this process by s3fs."""
        return self._gave and not self._hastens

    def before_forks(self) -> None:
        """For a process whose children hasten: finds out for them what they need."""
        self._access = self.access()

    def _check(self, entry: Entry) -> None:
        """Raises ListingChangedError: the file is another one now."""
        try:
            facts = self._connection.facts(entry)
        except OSError:
            raise
        except Exception as problem:
            raise OSError(f"{type(problem).__name__}: {problem}") from problem
        if facts.get("size") != entry.size_bytes or is_version(entry, facts) is False:
            raise changed(self.url, entry, f"{facts.get('size')} bytes")


def _pwrite_all(descriptor: int, body: bytes, at: int) -> None:
    view = memoryview(body)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def _pieces_of(descriptor: int) -> Iterator[bytes]:
    at = 0
    while piece := os.pread(descriptor, CHUNK_BYTES, at):
        yield piece
        at += len(piece)
