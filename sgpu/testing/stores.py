"""Stores that fail on purpose, behind the product's own Store protocol."""

from __future__ import annotations

import errno
import os
import pathlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from sgpu.checkpoint.stores.store import Observe, Store

Fault = Literal["error", "full", "short", "lost", "crash", "torn"]
WRITING = frozenset({"put", "create", "delete", "delete_files", "delete_folder"})
READING = frozenset({"names", "size", "sizes", "read"})


class FaultyStore:
    """Wraps a store and makes its Nth operation fail.

    Args:
        inner: the store that does the work.
        fail_at: which counted operation fails, from 1; 0: none.
        fault: "error": EIO before anything is done. "full": half of a file is taken, then ENOSPC; nothing appears.
            "short": a file appears, or is read, cut in half, without an error (a lying store). "lost": it is done, and
            the answer is lost (EIO). "crash": this process is killed before it, or when half of a file is taken.
            "torn": it is killed when half of a file can be seen. What has no halves is "error", or killed before.
        forever: all later operations fail as well, as with a disk that has gone.
        only: names of the operations that are counted.
        remote: files cannot be opened by path, so that all that is read is read through this store.

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
        remote: bool = False,
    ) -> None:
        self.url = inner.url
        self.operations: list[tuple[str, str]] = []
        self.fired = 0
        self._inner = inner
        self._fail_at = fail_at
        self._fault = fault
        self._forever = forever
        self._only = only
        self._remote = remote
        self._lock = threading.Lock()

    @property
    def local_root(self) -> pathlib.Path | None:
        return None if self._remote else self._inner.local_root

    def _fails(self, name: str, path: str) -> bool:
        if name not in self._only:
            return False
        with self._lock:
            self.operations.append((name, path))
            count = len(self.operations)
            fails = count == self._fail_at or (self._forever and 0 < self._fail_at <= count)
            self.fired += fails
        return fails

    def _simple(self, name: str, path: str, *, halves: bool = False) -> bool:
        """Fails before the operation; True where it shall fail after it, or do half of it."""
        if not self._fails(name, path):
            return False
        if self._fault in ("crash", "torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._fault == "lost" or (halves and self._fault == "short"):
            return True
        raise OSError(errno.EIO, os.strerror(errno.EIO), f"{name} {path}")

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

    def sizes(self, folder: str) -> dict[str, int]:
        lost = self._simple("sizes", folder)
        found = self._inner.sizes(folder)
        self._after(lost, "sizes", folder)
        return found

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        late = self._simple("read", path, halves=True)
        found = self._inner.read(path, offset, length)
        if late and self._fault == "short":
            return found[: len(found) // 2]
        self._after(late, "read", path)
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
        if self._fault in ("short", "torn"):
            self._inner.put(path, [half])
            if self._fault == "torn":
                os.kill(os.getpid(), signal.SIGKILL)
            return len(content)

        def runs_full() -> Iterable[memoryview]:
            yield half
            if self._fault == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
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

    def delete_files(self, paths: Sequence[str]) -> None:
        lost = self._simple("delete_files", " ".join(paths))
        self._inner.delete_files(paths)
        self._after(lost, "delete_files", " ".join(paths))

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
        self.sizes = inner.sizes
        self.read = inner.read
        self.create = inner.create
        self.delete = inner.delete
        self.delete_files = inner.delete_files
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


class LateListingStore:
    """Wraps a store, as a remote one whose lists of names are late: that of the root is the one of when `catch_up` was
    last called, that of any other folder the one of a few lists ago. Questions about one name are answered truly.

    Attributes:
        late: how many lists were not what is there; a test asserts it.
    """

    LISTS_AGO = 2

    def __init__(self, inner: Store) -> None:
        self.url = inner.url
        self.late = 0
        self._inner = inner
        self._lists: dict[str, deque[dict[str, int | None]]] = {}
        self.local_root = None
        self.size = inner.size
        self.read = inner.read
        self.put = inner.put
        self.create = inner.create
        self.delete = inner.delete
        self.delete_files = inner.delete_files
        self.delete_folder = inner.delete_folder

    def catch_up(self) -> None:
        self._lists[""] = deque([self._true("")])

    def _true(self, folder: str) -> dict[str, int | None]:
        files: dict[str, int | None] = dict.fromkeys(self._inner.names(folder))
        return {**files, **self._inner.sizes(folder)}

    def _listed(self, folder: str) -> dict[str, int | None]:
        true = self._true(folder)
        known = self._lists.setdefault(folder, deque([{}] * (self.LISTS_AGO if folder else 1), self.LISTS_AGO))
        found = known[0]
        if folder:
            known.append(true)
        self.late += found != true
        return found

    def names(self, folder: str) -> list[str]:
        return sorted(self._listed(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        return {name: size for name, size in self._listed(folder).items() if size is not None}
