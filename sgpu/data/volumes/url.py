"""A volume behind a URL, by fsspec."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import fsspec

from sgpu.contract.errors import DataError, VolumeError
from sgpu.data.order import mix
from sgpu.data.volumes.credentials import is_refused, provider_of
from sgpu.data.volumes.entry import CHUNK_BYTES, Entry, changed

T = TypeVar("T")
RANGE_BYTES = 8 << 20  # a larger file comes in pieces of this size
STALL_SECONDS = 60.0  # for one request of at most so many bytes
_RANGES_AT_ONCE = 4
_ASKING_THREADS = 32
_TAGS = ("ETag", "etag")
_EXTRAS = {"s3": ("s3", "s3a"), "gcs": ("gs", "gcs"), "azure": ("abfs", "abfss", "az", "adl")}


class _Opened(NamedTuple):
    """A file system of one process. `renewed`: how often the store has refused before."""

    pid: int
    filesystem: Any
    root: str
    renewed: int


class UrlVolume:
    """Whatever fsspec reaches: s3://, gs://, abfs://, memory:// (this process and its forks only).

    Args:
        credentials: "module:function", which gives fsspec's storage options; asked at the beginning, and again when the
            store refuses. None: the usual means of each store, looked up again then.
    """

    def __init__(self, url: str, credentials: str | None = None) -> None:
        self.url, self.credentials = url.rstrip("/"), credentials
        self._opened: _Opened | None = None
        self._lock = threading.Lock()
        try:
            there = self._asked(lambda filesystem, root: filesystem.isdir(root))
        except VolumeError:
            raise
        except Exception as problem:  # each store has errors of its own
            raise VolumeError(f"volume {self.url} cannot be reached: {problem!r}", url=self.url) from problem
        if not there:
            raise VolumeError(
                f"volume {self.url} does not exist or holds nothing. Expected a folder or prefix with files; check its "
                "name and your credentials.",
                url=self.url,
            )

    def _open(self) -> _Opened:
        """The file system of this process; fsspec's are not to be shared over a fork."""
        if self._opened is None or self._opened.pid != os.getpid():
            self._lock = threading.Lock()  # a fork may have copied one that is held
            self._opened = self._connect(0)
        return self._opened

    def _connect(self, renewed: int) -> _Opened:
        options = {} if self.credentials is None else provider_of(self.credentials)()
        try:
            filesystem, root = fsspec.core.url_to_fs(
                self.url, **options, **({"skip_instance_cache": True} if renewed else {})
            )
        except (ImportError, ValueError) as problem:
            scheme = self.url.partition("://")[0]
            extra = next((f'"sgpu[{name}]"' for name, schemes in _EXTRAS.items() if scheme in schemes), "s3fs or gcsfs")
            raise VolumeError(
                f"volume {self.url} cannot be opened: {problem}. For {scheme}:// install the fsspec package "
                f"that serves it, as with pip install {extra}.",
                url=self.url,
            ) from problem
        return _Opened(os.getpid(), filesystem, root.rstrip("/"), renewed)

    def _asked(self, call: Callable[[Any, str], T]) -> T:
        """What the store answers; where it refuses the credentials, once more with new ones."""
        opened = self._open()
        try:
            return call(opened.filesystem, opened.root)
        except Exception as problem:
            if not is_refused(problem):
                raise
        with self._lock:
            if self._opened is opened:  # no other thread was faster
                self._opened = self._connect(opened.renewed + 1)
            opened = self._opened or opened
        try:
            return call(opened.filesystem, opened.root)
        except Exception as problem:
            if not is_refused(problem):
                raise
            raise PermissionError(
                errno.EACCES,
                f"the store refuses these credentials, and also those that were looked up anew ({problem}); renew "
                "them, or name a function that does (credentials=)",
            ) from problem

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "credentials": self.credentials}

    def __setstate__(self, told: dict[str, Any]) -> None:
        self.url, self.credentials = told["url"], told["credentials"]
        self._opened, self._lock = None, threading.Lock()

    def entries(self) -> Iterator[Entry]:
        def find(filesystem: Any, root: str) -> tuple[str, dict[str, Any]]:
            filesystem.invalidate_cache()
            return root, filesystem.find(root, detail=True)

        try:
            root, found = self._asked(find)
        except VolumeError:
            raise
        except Exception as problem:
            raise VolumeError(f"volume {self.url} cannot be listed: {problem!r}", url=self.url) from problem
        files = {name: facts for name, facts in found.items() if facts.get("type", "file") == "file"}
        unsized = [name for name, facts in files.items() if facts.get("size") is None]
        if unsized:  # an HTTP server's page of links names the files only
            with ThreadPoolExecutor(_ASKING_THREADS) as pool:
                files.update(zip(unsized, pool.map(self._info, unsized), strict=True))
        for name, facts in files.items():
            path = name[len(root) :].removeprefix("/")
            if path and not path.endswith("/"):
                yield Entry(path, int(facts.get("size") or 0), stamp_of(facts), digest_of(facts), etag_of(facts))

    def _info(self, name: str) -> dict[str, Any]:
        try:
            facts: dict[str, Any] = self._asked(lambda filesystem, _: filesystem.info(name))
        except Exception as problem:
            raise VolumeError(f"{name} in volume {self.url} cannot be read: {problem!r}", url=self.url) from problem
        if facts.get("size") is None:
            raise VolumeError(
                f"{name} in volume {self.url}: its size is not told, and without it no copy can be checked. Serve the "
                "files with a Content-Length, or copy them to a folder or an object store.",
                url=self.url,
            )
        return facts

    def copy(self, entry: Entry, descriptor: int) -> None:
        if entry.size_bytes <= RANGE_BYTES:
            body = self._piece(entry, None, None)
            if len(body) != entry.size_bytes:
                self._other_size(entry, len(body))
            _pwrite_all(descriptor, body, 0)
        else:
            self._copy_in_ranges(entry, descriptor)
        if entry.digest and _md5_of(descriptor) != entry.digest:
            raise OSError(f"{entry.path}: the bytes that came have another checksum than the store tells")

    def _copy_in_ranges(self, entry: Entry, descriptor: int) -> None:
        """A large file by several requests at a time, each of which can fail or stall by itself."""

        def bring(start: int) -> None:
            _pwrite_all(descriptor, self.read(entry, start, min(entry.size_bytes, start + RANGE_BYTES)), start)

        with ThreadPoolExecutor(_RANGES_AT_ONCE) as pool:
            for done in pool.map(bring, range(0, entry.size_bytes, RANGE_BYTES)):
                del done

    def read(self, entry: Entry, start: int, stop: int) -> bytes:
        piece = self._piece(entry, start, stop)
        if len(piece) == entry.size_bytes > stop - start:  # a server that knows no ranges
            piece = piece[start:stop]
        if len(piece) != stop - start:
            self._other_size(entry, None)
            raise OSError(f"{entry.path}: {len(piece)} of {stop - start} bytes came from {start}")
        return piece

    def _piece(self, entry: Entry, start: int | None, stop: int | None) -> bytes:
        def bring(filesystem: Any, root: str) -> bytes:
            name, bounds = f"{root}/{entry.path}", {} if start is None else {"start": start, "end": stop}
            if not filesystem.async_impl:
                with filesystem.open(name, "rb", cache_type="none") as file:
                    file.seek(start or 0)
                    body: bytes = file.read(-1 if start is None or stop is None else stop - start)
                return body
            told: bytes = fsspec.asyn.sync(filesystem.loop, filesystem._cat_file, name, timeout=STALL_SECONDS, **bounds)
            return told

        try:
            return self._asked(bring)
        except (OSError, DataError):
            raise
        except Exception as problem:
            raise OSError(f"{type(problem).__name__}: {problem}") from problem

    def _other_size(self, entry: Entry, got: int | None) -> None:
        """Raises: the file is another one now, or it only came in part."""

        def size_of(filesystem: Any, root: str) -> Any:
            filesystem.invalidate_cache()
            return filesystem.info(f"{root}/{entry.path}").get("size")

        try:
            size = self._asked(size_of)
        except OSError:
            raise
        except Exception as problem:
            raise OSError(f"{type(problem).__name__}: {problem}") from problem
        if size != entry.size_bytes:
            raise changed(self.url, entry, f"{size} bytes")
        if got is not None:
            raise OSError(f"{entry.path}: {got} of {entry.size_bytes} bytes came")

    def has_folder(self, path: str) -> bool:
        try:
            return bool(self._asked(lambda filesystem, root: filesystem.isdir(f"{root}/{path}")))
        except Exception as problem:
            raise VolumeError(f"volume {self.url} cannot be reached: {problem!r}", url=self.url) from problem

    def direct(self, path: str) -> str | None:
        return None


def _pwrite_all(descriptor: int, body: bytes, at: int) -> None:
    view = memoryview(body)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def _md5_of(descriptor: int) -> bytes:
    hashed, at = hashlib.md5(usedforsecurity=False), 0
    while piece := os.pread(descriptor, CHUNK_BYTES, at):
        hashed.update(piece)
        at += len(piece)
    return hashed.digest()


def stamp_of(facts: dict[str, Any]) -> int:
    """The version of an object as a time: seconds of its last change, and its etag's bits below a second."""
    changed_at = next(
        (facts[key] for key in ("LastModified", "mtime", "last_modified", "updated", "created") if facts.get(key)), 0
    )
    if hasattr(changed_at, "timestamp"):
        seconds = float(changed_at.timestamp())
    else:
        seconds = float(changed_at) if isinstance(changed_at, int | float) else 0.0
    tag = next((str(facts[key]) for key in (*_TAGS, "md5Hash", "content_md5") if facts.get(key)), None)
    if tag is None:
        return int(seconds * 1e6)
    return int(seconds) * 1_000_000 + mix(*tag.encode()) % 1_000_000


def etag_of(facts: dict[str, Any]) -> str:
    """The store's own name of this version of an object, without quotes; empty where it tells none."""
    return next((str(facts[key]).strip('"') for key in _TAGS if facts.get(key)), "")


def digest_of(facts: dict[str, Any]) -> bytes:
    """The MD5 that Google's and Azure's stores tell (an S3 etag is one only sometimes, and does not say when)."""
    told = facts.get("md5Hash") or facts.get("content_md5") or (facts.get("content_settings") or {}).get("content_md5")
    if isinstance(told, str):
        try:
            told = base64.b64decode(told, validate=True)
        except ValueError:
            return b""
    return bytes(told) if isinstance(told, bytes | bytearray) and len(told) == 16 else b""
