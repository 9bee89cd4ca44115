"""Stores that fail on purpose, behind the product's own Store protocol."""

from __future__ import annotations

import errno
import os
import pathlib
import threading
from collections.abc import Callable, Iterable
from typing import Literal

from sgpu.checkpoint.storage import Observe, Store

Fault = Literal["error", "full", "short", "lost"]
WRITING = frozenset({"put", "create", "delete", "delete_folder"})


class FaultyStore:
    """Wraps a store and makes its Nth operation fail.

    Args:
        inner: the store that does the work.
        fail_at: which counted operation fails, from 1; 0: none.
        fault: "error": EIO before anything is done. "full": half of a file is taken, then ENOSPC; nothing appears.
            "short": a file appears, cut in half, without an error (a lying store). "lost": it is done, and the answer
            is lost (EIO). Only `put` has halves; elsewhere these are "error".
        forever: all later operations fail as well, as with a disk that has gone.
        only: names of the operations that are counted.

    Attributes:
        operations: each counted operation, as (name, path).
        fired: how many times a fault happened; a test asserts it.
    """

    def __init__(
        self,
        inner: Store,
        *,
        fail_at: int = 0,
        fault: Fault = "error",
        forever: bool = False,
        only: frozenset[str] = WRITING,
    ) -> None:
        self.url = inner.url
        self.operations: list[tuple[str, str]] = []
        self.fired = 0
        self._inner = inner
        self._fail_at = fail_at
        self._fault = fault
        self._forever = forever
        self._only = only
        self._lock = threading.Lock()

    @property
    def local_root(self) -> pathlib.Path | None:
        return self._inner.local_root

    def _fails(self, name: str, path: str) -> bool:
        if name not in self._only:
            return False
        with self._lock:
            self.operations.append((name, path))
            count = len(self.operations)
            fails = count == self._fail_at or (self._forever and 0 < self._fail_at <= count)
            self.fired += fails
        return fails

    def _simple(self, name: str, path: str) -> bool:
        """Fails before the operation; True where it shall fail after it."""
        if not self._fails(name, path):
            return False
        if self._fault != "lost":
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"{name} {path}")
        return True

    def _after(self, lost: bool, name: str, path: str) -> None:
        if lost:
            raise OSError(errno.EIO, "the answer was lost", f"{name} {path}")

    def names(self, folder: str) -> list[str]:
        lost = self._simple("names", folder)
        found = self._inner.names(folder)
        self._after(lost, "names", folder)
        return found

    def size(self, path: str) -> int | None:
        lost = self._simple("size", path)
        found = self._inner.size(path)
        self._after(lost, "size", path)
        return found

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        lost = self._simple("read", path)
        found = self._inner.read(path, offset, length)
        self._after(lost, "read", path)
        return found

    def put(self, path: str, parts: Iterable[memoryview], observe: Observe | None = None) -> int:
        if not self._fails("put", path):
            return self._inner.put(path, parts, observe)
        if self._fault == "error":
            raise OSError(errno.EIO, os.strerror(errno.EIO), f"put {path}")
        if self._fault == "lost":
            self._inner.put(path, parts, observe)
            raise OSError(errno.EIO, "the answer was lost", f"put {path}")
        content = b"".join(bytes(part) for part in parts)
        if observe is not None:
            observe(memoryview(content))
        half = memoryview(content)[: len(content) // 2]
        if self._fault == "short":
            self._inner.put(path, [half])
            return len(content)

        def runs_full() -> Iterable[memoryview]:
            yield half
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"put {path}")

        return self._inner.put(path, runs_full())

    def create(self, path: str, content: bytes) -> bool:
        lost = self._simple("create", path)
        made = self._inner.create(path, content)
        self._after(lost, "create", path)
        return made

    def delete(self, path: str) -> None:
        lost = self._simple("delete", path)
        self._inner.delete(path)
        self._after(lost, "delete", path)

    def delete_folder(self, folder: str) -> None:
        lost = self._simple("delete_folder", folder)
        self._inner.delete_folder(folder)
        self._after(lost, "delete_folder", folder)


class GateStore:
    """Wraps a store; `put` waits until `open_gate()`: a slow writer without sleeping.

    Args:
        inner: the store that does the work.
        holds: which paths wait.

    Attributes:
        reached: set when a put has arrived at the gate.
    """

    def __init__(self, inner: Store, holds: Callable[[str], bool] = lambda path: path.endswith(".distcp")) -> None:
        self.url = inner.url
        self.reached = threading.Event()
        self._inner = inner
        self._holds = holds
        self._gate = threading.Event()
        self.names = inner.names
        self.size = inner.size
        self.read = inner.read
        self.create = inner.create
        self.delete = inner.delete
        self.delete_folder = inner.delete_folder

    @property
    def local_root(self) -> pathlib.Path | None:
        return self._inner.local_root

    def open_gate(self) -> None:
        self._gate.set()

    def put(self, path: str, parts: Iterable[memoryview], observe: Observe | None = None) -> int:
        if self._holds(path):
            self.reached.set()
            self._gate.wait()
        return self._inner.put(path, parts, observe)
