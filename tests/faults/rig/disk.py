"""A disk that fails, for all processes below one: what reaches it is wrapped, and a shared page says how it is.

A fault is of one place: the files whose path contains a text. Writing goes through `os.write` and files opened for
writing, reading through files opened for reading. The page also holds how far the wall clock has jumped.
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable
from typing import Any

_PAGE = struct.Struct("<dqqqd")  # clock offset, kind, how often yet (-1: for good), how often it struck, seconds
KINDS = ("none", "full", "error", "slow", "flip", "remote")


class Disk:
    """The page. Made and `install`ed before the first fork; whoever reaches a moment calls `fail`."""

    def __init__(self, place: str, *, reading: bool = False) -> None:
        self._page = mmap.mmap(-1, _PAGE.size)
        self._place, self.reading = place, reading
        self._store(0.0, 0, 0, 0, 0.0)

    def _load(self) -> tuple[float, int, int, int, float]:
        return _PAGE.unpack_from(self._page)  # type: ignore[return-value]

    def _store(self, *values: float) -> None:
        _PAGE.pack_into(self._page, 0, *values)

    def fail(self, kind: str, *, times: int = -1, seconds: float = 0.0) -> None:
        """From now on, in every process; `times` -1: until `mend`."""
        offset, _, _, struck, _ = self._load()
        self._store(offset, KINDS.index(kind), times, struck, seconds)

    def mend(self) -> None:
        offset, _, _, struck, _ = self._load()
        self._store(offset, 0, 0, struck, 0.0)

    @property
    def struck(self) -> int:
        """How often a call failed, waited or was changed."""
        return self._load()[3]

    def jump(self, seconds: float) -> None:
        """The wall clock of all processes, now."""
        _, *rest = self._load()
        self._store(seconds, *rest)

    def refuses_remote(self) -> bool:
        """Whether a question to a remote store is answered by an error of its server."""
        offset, number, times, struck, seconds = self._load()
        if KINDS[number] != "remote":
            return False
        self._store(offset, number if times > 1 else 0, times - 1, struck + 1, seconds)
        return True

    @property
    def _fails(self) -> bool:
        return KINDS[self._load()[1]] not in ("none", "remote")

    # ---- what is wrapped

    def install(self) -> None:
        write, opened, clock, clock_ns = os.write, builtins.open, time.time, time.time_ns
        os.write = self._writes(write)
        builtins.open = io.open = self._opens(opened)  # type: ignore[assignment]
        low_open = os.open

        def open_low(path: Any, flags: int, *rest: Any, **options: Any) -> int:
            if flags & os.O_CREAT and self._active(path):
                self._strike(write=True)
            return low_open(path, flags, *rest, **options)

        os.open = open_low
        time.time = lambda: clock() + self._load()[0]
        time.time_ns = lambda: clock_ns() + int(self._load()[0] * 1e9)

    def _active(self, path: Any) -> bool:
        if not self._fails or not isinstance(path, (str, os.PathLike)):
            return False
        return self._place in os.path.abspath(os.fspath(path))

    def _strike(self, *, write: bool) -> str:
        """Fails or waits; what is to be done to the bytes."""
        offset, number, times, struck, seconds = self._load()
        kind = KINDS[number]
        if write == self.reading or kind == "none":
            return "none"
        left = times - 1 if times > 0 else times
        self._store(offset, number if left else 0, left, struck + 1, seconds)
        if kind == "slow":
            time.sleep(seconds)
        elif kind != "flip":
            code = errno.ENOSPC if kind == "full" else errno.EIO
            raise OSError(code, os.strerror(code))
        return kind

    def _writes(self, real: Callable[[int, Any], int]) -> Callable[[int, Any], int]:
        def write(descriptor: int, content: Any) -> int:
            if not self._fails or not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return real(descriptor, content)
            if self._place not in os.readlink(f"/proc/self/fd/{descriptor}") or not len(content):
                return real(descriptor, content)
            if self._strike(write=True) == "flip":
                content = bytearray(content)
                content[len(content) // 2] ^= 1
            return real(descriptor, content)

        return write

    def _opens(self, real: Any) -> Any:
        def opened(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
            if self._active(file):
                self._strike(write=any(letter in mode for letter in "wax"))
            return real(file, mode, *rest, **options)

        return opened
