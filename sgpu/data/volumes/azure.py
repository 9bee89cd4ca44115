"""Azure's blobs, asked of adlfs' own client.

Adlfs itself takes names for URLs (a tab is lost, and what follows "?versionid="), gives a folder's marker as a file,
and throws the version away that comes with bytes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.metadata
import os
from collections.abc import Iterator
from typing import Any

from sgpu.data.volumes.versions import Answer, Facts

_FOLDERS = ("hdi_isfolder", "is_directory")  # in the metadata of what stands for a folder


def is_azure(filesystem: Any) -> bool:
    return hasattr(filesystem, "service_client")


async def find(filesystem: Any, root: str) -> dict[str, Facts]:
    """What is below `root`, by its whole name. Raises FileNotFoundError: there is no such container."""
    container, _, folder = root.partition("/")
    with _absence_told(container):
        async with filesystem.service_client.get_container_client(container) as client:
            return {
                f"{container}/{blob.name}": _facts(blob)
                async for blob in client.list_blobs(f"{folder}/" if folder else None, include=["metadata"])
                if not _is_folder(blob)
            }


async def facts_of(filesystem: Any, name: str) -> Facts:
    """Raises FileNotFoundError."""
    container, _, blob = name.partition("/")
    with _absence_told(name):
        async with filesystem.service_client.get_blob_client(container, blob) as client:
            return _facts(await client.get_blob_properties())


async def answer_of(filesystem: Any, name: str, start: int | None, stop: int | None) -> Answer:
    """A blob, or `start` to `stop` of it, with its version. Raises FileNotFoundError."""
    container, _, blob = name.partition("/")
    length = None if start is None or stop is None else stop - start
    waits = getattr(filesystem, "_timeout_kwargs", {})
    with _absence_told(name):
        async with filesystem.service_client.get_blob_client(container, blob) as client:
            coming = await client.download_blob(None if length is None else start, length, **_as_kept(), **waits)
            return Answer(await coming.readall(), _facts(coming.properties))


@contextlib.contextmanager
def _absence_told(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        if getattr(problem, "status_code", None) == 404:
            code = getattr(problem, "error_code", None)
            raise FileNotFoundError(errno.ENOENT, str(code or os.strerror(errno.ENOENT)), name) from problem
        raise


@functools.cache
def _as_kept() -> dict[str, bool]:
    """Asks for the bytes that are kept, also where they are marked as compressed. (Before 12.28 nothing does.)"""
    major, minor = importlib.metadata.version("azure-storage-blob").split(".")[:2]
    return {"decompress": False} if (int(major), int(minor)) >= (12, 28) else {}


def _is_folder(blob: Any) -> bool:
    told = {key.lower(): value for key, value in (blob.metadata or {}).items()}
    return any(told.get(key) == "true" for key in _FOLDERS)


def _facts(blob: Any) -> Facts:
    return {
        "size": blob.size, "etag": blob.etag, "last_modified": blob.last_modified,
        "content_md5": blob.content_settings.content_md5,
    }  # fmt: skip
