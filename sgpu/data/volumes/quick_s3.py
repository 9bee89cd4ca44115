"""Reads of S3 objects by obstore, where it is installed: a third of the time and a fifth of the CPU of s3fs.

Its runtime does not live through a fork, so that a process that forks must not read by it; one that was forked may,
where it was not loaded before. It asks with the credentials that s3fs has at the time. Whatever it fails at, s3fs is
asked for, whose errors are the ones that are told.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import sys
import threading
from typing import Any, NamedTuple

import fsspec

from sgpu.data.volumes.versions import Answer

_FAILURES = 3  # one after the other, from which on it is not tried again
_inherited = False  # whether a fork has copied its runtime, perhaps, and none of its threads


def _forked() -> None:
    global _inherited
    _inherited = "obstore" in sys.modules


os.register_at_fork(after_in_child=_forked)


class Access(NamedTuple):
    """What s3fs signs with, as obstore names it, where it asks, and the region."""

    keys: dict[str, Any]
    endpoint: str
    region: str


def access_of(filesystem: Any) -> Access | None:
    """For processes that are about to be forked, each of which would take a tenth of a second of CPU to find it out."""
    if not _is_plain(filesystem) or importlib.util.find_spec("obstore") is None:
        return None
    found: Access | None = fsspec.asyn.sync(filesystem.loop, _access_if_any, filesystem)
    return found


def _is_plain(filesystem: Any) -> bool:
    return hasattr(filesystem, "_call_s3") and not filesystem.req_kw and not filesystem.version_aware


def reader_of(filesystem: Any, stall_seconds: float, access: Access | None = None) -> QuickS3 | None:
    """For an s3fs file system that asks for nothing special; None where obstore is not installed, or would not work.

    Args:
        access: to begin with; None: what s3fs has.
    """
    if _inherited or not _is_plain(filesystem):
        return None
    try:
        obstore = importlib.import_module("obstore")
        stores = importlib.import_module("obstore.store")
    except ImportError:
        return None
    return QuickS3(filesystem, obstore, stores, stall_seconds, access)


class QuickS3:
    """For any thread.

    Attributes:
        answers: objects, or parts of them, that it brought.
    """

    def __init__(self, filesystem: Any, obstore: Any, stores: Any, stall_seconds: float, access: Access | None) -> None:
        self.filesystem, self.answers, self._access = filesystem, 0, access
        self._obstore, self._stores, self._stall_seconds = obstore, stores, stall_seconds
        self._opened: dict[str, Any] = {}  # by bucket
        self._failures = 0
        self._lock = threading.Lock()

    def ask(self, name: str, start: int | None, stop: int | None) -> Answer | None:
        """An object, or `start` to `stop` of it; None: ask s3fs."""
        if self._failures >= _FAILURES or _inherited:
            return None
        bucket, key, _ = self.filesystem.split_path(name)
        try:
            store = self._store(bucket)
            options = None if start is None or stop is None else {"range": (start, stop)}
            reply = self._obstore.get(store, key, options=options)
            answer = Answer(bytes(reply.bytes()), {"ETag": reply.meta["e_tag"]} if reply.meta["e_tag"] else {})
        except (OSError, ValueError, self._obstore.exceptions.BaseError):
            with self._lock:
                self._failures += 1
                self._opened.pop(bucket, None)  # its credentials may have run out
                self._access = None
            return None
        self._failures = 0
        self.answers += 1
        return answer

    def _store(self, bucket: str) -> Any:
        with self._lock:
            if bucket not in self._opened:
                self._opened[bucket] = self._open(bucket)
            return self._opened[bucket]

    def _open(self, bucket: str) -> Any:
        keys, endpoint, region = self._access or _access(self.filesystem)
        return self._stores.S3Store(
            bucket, endpoint=endpoint, region=region, virtual_hosted_style_request=False, **keys,
            client_options={"timeout": f"{self._stall_seconds:.0f}s", "allow_http": endpoint.startswith("http://")},
            retry_config={"max_retries": 0},
        )  # fmt: skip


def _access(filesystem: Any) -> Access:
    found: Access = fsspec.asyn.sync(filesystem.loop, _asked_for_access, filesystem)
    return found


async def _access_if_any(filesystem: Any) -> Access | None:
    """None where there is none now, for whatever reason: who reads meets the same, and tells it."""
    answers = await asyncio.gather(_asked_for_access(filesystem), return_exceptions=True)
    return answers[0] if isinstance(answers[0], Access) else None


async def _asked_for_access(filesystem: Any) -> Access:
    client = await filesystem.set_session()
    endpoint, region = client.meta.endpoint_url, client.meta.region_name
    if filesystem.anon:
        return Access({"skip_signature": True}, endpoint, region)
    credentials = client._request_signer._credentials
    if credentials is None:
        raise ValueError("s3fs has no credentials")
    frozen = await credentials.get_frozen_credentials()
    keys = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key}
    return Access({**keys, "session_token": frozen.token} if frozen.token else keys, endpoint, region)
