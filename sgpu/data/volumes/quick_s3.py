"""Reads of S3 objects by obstore, where it is installed: a third of the time and a fifth of the CPU of s3fs.

Its runtime does not live through a fork, so that only processes that are executed and never fork read by it. It asks
with the credentials that s3fs has at the time. Whatever it fails at, s3fs is asked for, whose errors are the ones that
are told.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

import fsspec

from sgpu.data.volumes.versions import Answer

_FAILURES = 3  # one after the other, from which on it is not tried again


def reader_of(filesystem: Any, stall_seconds: float) -> QuickS3 | None:
    """For an s3fs file system that asks for nothing special; None where obstore is not installed."""
    if not hasattr(filesystem, "_call_s3") or filesystem.req_kw or filesystem.version_aware:
        return None
    try:
        obstore = importlib.import_module("obstore")
        stores = importlib.import_module("obstore.store")
    except ImportError:
        return None
    return QuickS3(filesystem, obstore, stores, stall_seconds)


class QuickS3:
    """For any thread.

    Attributes:
        answers: objects, or parts of them, that it brought.
    """

    def __init__(self, filesystem: Any, obstore: Any, stores: Any, stall_seconds: float) -> None:
        self.filesystem, self.answers = filesystem, 0
        self._obstore, self._stores, self._stall_seconds = obstore, stores, stall_seconds
        self._opened: dict[str, Any] = {}  # by bucket
        self._failures = 0
        self._lock = threading.Lock()

    def ask(self, name: str, start: int | None, stop: int | None) -> Answer | None:
        """An object, or `start` to `stop` of it; None: ask s3fs."""
        if self._failures >= _FAILURES:
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
        files = self.filesystem
        keys, endpoint, region = fsspec.asyn.sync(files.loop, _keys_of, files)
        return self._stores.S3Store(
            bucket, endpoint=endpoint, region=region, virtual_hosted_style_request=False, **keys,
            client_options={"timeout": f"{self._stall_seconds:.0f}s", "allow_http": endpoint.startswith("http://")},
            retry_config={"max_retries": 0},
        )  # fmt: skip


async def _keys_of(filesystem: Any) -> tuple[dict[str, Any], str, str]:
    """What s3fs signs with now, where it asks, and the region."""
    client = await filesystem.set_session()
    endpoint, region = client.meta.endpoint_url, client.meta.region_name
    if filesystem.anon:
        return {"skip_signature": True}, endpoint, region
    credentials = client._request_signer._credentials
    if credentials is None:
        raise ValueError("s3fs has no credentials")
    frozen = await credentials.get_frozen_credentials()
    keys = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key}
    return ({**keys, "session_token": frozen.token} if frozen.token else keys), endpoint, region
