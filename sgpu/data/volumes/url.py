"""A volume behind a URL, by fsspec."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec

from sgpu.contract.errors import FetchError, VolumeError
from sgpu.data.order import mix
from sgpu.data.volumes.entry import CHUNK_BYTES, Entry, changed, write_all

_ASKING_THREADS = 32
_TAGS = ("ETag", "etag")


class UrlVolume:
    """Whatever fsspec reaches: s3://, gs://, abfs://, memory:// (this process and its forks only)."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opened: tuple[int, Any, str] | None = None
        filesystem, root = self._open()
        try:
            there = filesystem.isdir(root)
        except Exception as problem:  # each store has errors of its own
            raise VolumeError(f"volume {self.url} cannot be reached: {problem!r}", url=self.url) from problem
        if not there:
            raise VolumeError(
                f"volume {self.url} does not exist or holds nothing. Expected a folder or prefix with files; check its "
                "name and your credentials.",
                url=self.url,
            )

    def _open(self) -> tuple[Any, str]:
        """The file system of this process; fsspec's are not to be shared over a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            try:
                filesystem, root = fsspec.core.url_to_fs(self.url)
            except (ImportError, ValueError) as problem:
                scheme = self.url.partition("://")[0]
                raise VolumeError(
                    f"volume {self.url} cannot be opened: {problem}. For {scheme}:// install the fsspec package "
                    "that serves it (s3fs, gcsfs, adlfs).",
                    url=self.url,
                ) from problem
            self._opened = os.getpid(), filesystem, root.rstrip("/")
        return self._opened[1], self._opened[2]

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "_opened": None}

    def entries(self) -> Iterator[Entry]:
        filesystem, root = self._open()
        filesystem.invalidate_cache()
        try:
            found = filesystem.find(root, detail=True)
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
            facts: dict[str, Any] = self._open()[0].info(name)
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
        filesystem, root = self._open()
        name = f"{root}/{entry.path}"
        try:
            with filesystem.open(name, "rb", cache_type="none") as source:
                got, hashed = 0, hashlib.md5(usedforsecurity=False)
                while piece := source.read(CHUNK_BYTES):
                    write_all(descriptor, piece)
                    got += len(piece)
                    if entry.digest:
                        hashed.update(piece)
            if got != entry.size_bytes:
                filesystem.invalidate_cache()
                size = filesystem.info(name).get("size")
        except (OSError, FetchError):
            raise
        except Exception as problem:
            raise OSError(f"{type(problem).__name__}: {problem}") from problem
        if got != entry.size_bytes:
            if size != entry.size_bytes:
                raise changed(self.url, entry, f"{size} bytes")
            raise OSError(f"{entry.path}: {got} of {entry.size_bytes} bytes came")
        if entry.digest and hashed.digest() != entry.digest:
            raise OSError(f"{entry.path}: the bytes that came have another checksum than the store tells")

    def read(self, entry: Entry, start: int, stop: int) -> bytes:
        filesystem, root = self._open()
        try:
            piece: bytes = filesystem.cat_file(f"{root}/{entry.path}", start=start, end=stop)
        except OSError:
            raise
        except Exception as problem:
            raise OSError(f"{type(problem).__name__}: {problem}") from problem
        if len(piece) != stop - start:
            raise OSError(f"{entry.path}: {len(piece)} of {stop - start} bytes came from {start}")
        return piece

    def has_folder(self, path: str) -> bool:
        filesystem, root = self._open()
        try:
            return bool(filesystem.isdir(f"{root}/{path}"))
        except Exception as problem:
            raise VolumeError(f"volume {self.url} cannot be reached: {problem!r}", url=self.url) from problem

    def direct(self, path: str) -> str | None:
        return None


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
