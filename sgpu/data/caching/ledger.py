"""Bytes in a cache folder, files on their way included, and bytes still on their way: two numbers under a lock."""

from __future__ import annotations

import fcntl
import mmap
import os
import pathlib
import struct
import threading
import weakref
from typing import NamedTuple

_FORMAT = struct.Struct("<qq")
_UNKNOWN = _FORMAT.pack(-1, -1)


class Used(NamedTuple):
    """Attributes: `total_bytes`: of all files, `coming_bytes` included: those still to be written."""

    total_bytes: int
    coming_bytes: int


class Ledger:
    """The file with the numbers, in one process; its threads, and all processes of the node, take turns."""

    def __init__(self, file: pathlib.Path) -> None:
        self._lock, self._in_turn = threading.RLock(), False
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            if os.fstat(self._descriptor).st_size != _FORMAT.size:
                os.pwrite(self._descriptor, _UNKNOWN, 0)
                os.ftruncate(self._descriptor, _FORMAT.size)
            self._numbers = mmap.mmap(self._descriptor, _FORMAT.size)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def take_turn(self) -> bool:
        """Whether this is the outer of a thread's turns, which alone locks the file."""
        self._lock.acquire()
        if self._in_turn:
            return False
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            self._lock.release()
            raise
        self._in_turn = True
        return True

    def end_turn(self, is_outer: bool) -> None:
        if is_outer:
            self._in_turn = False
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._lock.release()

    def is_removed(self) -> bool:
        """Another file has its name now, or none."""
        return os.fstat(self._descriptor).st_nlink == 0

    def read(self) -> Used | None:
        """None: nobody has counted yet."""
        numbers = self._numbers[:]
        return None if numbers == _UNKNOWN else Used(*_FORMAT.unpack(numbers))

    def write(self, used: Used) -> None:
        _FORMAT.pack_into(self._numbers, 0, max(0, used.total_bytes), max(0, used.coming_bytes))
