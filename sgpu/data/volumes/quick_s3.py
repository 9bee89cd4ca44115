"""Reads of S3 objects by obstore, where it is installed: a third of the time and a fifth of the CPU of s3fs.

Its runtime does not live through a fork, so that a process that forks must not read by it; one that was forked may,
where it was not loaded before. It asks with the credentials that s3fs has, in this process or, to begin with, in the
one that started it: then s3fs, whose client takes half a second of CPU, is not even loaded here. Whatever it fails at,
s3fs is asked for, whose errors are the ones that are told.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from sgpu.data.volumes.versions import Answer

_FAILURES = 3  # one store after the other, from which on it is not tried again
_inherited = False  # whether a fork has copied its runtime, perhaps, and none of its threads


def _forked() -> None:
    global _inherited
    _inherited = "obstore" in sys.modules


os.register_at_fork(after_in_child=_forked)


class Access(NamedTuple):
    """How s3fs reaches a volume.

    Attributes:
        keys: what it signs with, as obstore names it.
        prefix: of the volume in its bucket, without slashes around it.
    """

    keys: dict[str, Any]
    endpoint: str
    region: str
    bucket: str
    prefix: str

    def __repr__(self) -> str:
        return f"<access to {self.bucket}/{self.prefix} at {self.endpoint}>"  # no secrets


def reader_of(access: Access | None, renewed: Callable[[], Access] | None, stall_seconds: float) -> QuickS3 | None:
    """None where obstore is not installed, or would not work.

    Args:
        access: to begin with; None: what `renewed` gives.
        renewed: access after a failure; None: there is none, and the first failure is the last.
    """
    if _inherited:
        return None
    try:
        obstore = importlib.import_module("obstore")
        stores = importlib.import_module("obstore.store")
    except ImportError:
        return None
    return QuickS3(obstore, stores, access, renewed, stall_seconds)


class QuickS3:
    """For any thread.

    Attributes:
        answers: objects, or parts of them, that it brought.
        gave_up: it will bring no more.
    """

    def __init__(
        self, obstore: Any, stores: Any, access: Access | None, renewed: Callable[[], Access] | None,
        stall_seconds: float,
    ) -> None:  # fmt: skip
        self._obstore, self._stores, self._stall_seconds = obstore, stores, stall_seconds
        self._access, self._renewed = access, renewed
        self._opened: tuple[Any, str] | None = None
        self.answers = self._failures = 0
        self._lock = threading.Lock()

    @property
    def gave_up(self) -> bool:
        return self._failures >= (_FAILURES if self._renewed else 1)

    def ask(self, path: str, start: int | None, stop: int | None) -> Answer | None:
        """A file of the volume, or `start` to `stop` of it; None: ask s3fs."""
        if self.gave_up or _inherited:
            return None
        opened = None
        try:
            opened = self._open()
            store, above = opened
            options = None if start is None or stop is None else {"range": (start, stop)}
            reply = self._obstore.get(store, above + path, options=options)
            answer = Answer(bytes(reply.bytes()), {"ETag": reply.meta["e_tag"]} if reply.meta["e_tag"] else {})
        except (OSError, ValueError, self._obstore.exceptions.BaseError):
            self._failed(opened)
            return None
        self._failures = 0
        self.answers += 1
        return answer

    def _failed(self, opened: tuple[Any, str] | None) -> None:
        """Its credentials may have run out, for all requests that were under way with them: one failure."""
        with self._lock:
            if self._opened is opened:
                self._failures += 1
                self._opened = self._access = None

    def _open(self) -> tuple[Any, str]:
        with self._lock:
            if self._opened is None:
                access = self._access
                if access is None:
                    if self._renewed is None:
                        raise ValueError("the access that was given is spent")
                    access = self._renewed()
                self._opened = self._store(access), f"{access.prefix}/" if access.prefix else ""
            return self._opened

    def _store(self, access: Access) -> Any:
        return self._stores.S3Store(
            access.bucket, endpoint=access.endpoint, region=access.region, virtual_hosted_style_request=False,
            **access.keys, retry_config={"max_retries": 0},
            client_options={
                "timeout": f"{self._stall_seconds:.0f}s", "allow_http": access.endpoint.startswith("http://"),
            },
        )  # fmt: skip
