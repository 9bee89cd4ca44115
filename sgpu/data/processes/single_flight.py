"""One process of a node at a time for each file, by locks that the kernel drops when their process dies."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Iterator

from sgpu.data.processes.forking import anew_in_forks

_WAIT_SECONDS = 60.0
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.001, 0.01
_SET = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK)  # of an open file, not of a process; Linux only
_RANGE = struct.Struct("hhqqi4x")  # struct flock: type, whence, start, length, pid


class SingleFlight:
    """A byte of one lock file stands for each file, so that to take or to free one is a single call.

    Where the disk knows no locks all go ahead. Threads that share this object take turns as processes do.

    Args:
        file: made when it is first needed.
    """

    def __init__(self, file: str) -> None:
        self._file = file
        self._descriptors: list[int] = []
        weakref.finalize(self, _close, self._descriptors).atexit = False
        self.begin_anew()
        anew_in_forks(self)

    def begin_anew(self) -> None:
        """For a forked process: what is locked is its parent's, and must not outlive it here."""
        _close(self._descriptors)
        self._taken, self._lock = set[int](), threading.Lock()

    def take(self, path: str) -> int:
        """Waits while another has this path, a minute at most (a mount may hang in open). Returns what `free` needs."""
        place = zlib.crc32(os.fsencode(path))
        deadline, pause = time.monotonic() + _WAIT_SECONDS, _FIRST_PAUSE_SECONDS
        while not self._try(place):
            if time.monotonic() > deadline:
                return -1
            time.sleep(pause)  # these locks know no time-out, and a thread blocked in one cannot be freed
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 1.5)
        return place

    def _try(self, place: int) -> bool:
        with self._lock:
            if place in self._taken:
                return False
            self._taken.add(place)
            self._open()
        if self._descriptors and self._locked(fcntl.F_WRLCK, place) in (errno.EAGAIN, errno.EACCES):
            self._taken.discard(place)
            return False
        return True

    def _open(self) -> None:
        if not self._descriptors:
            with contextlib.suppress(OSError):
                self._descriptors.append(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600))

    def _locked(self, kind: int, place: int) -> int:
        """Returns 0, or the error's number."""
        try:
            fcntl.fcntl(self._descriptors[0], _SET, _RANGE.pack(kind, os.SEEK_SET, place, 1, 0))
        except OSError as problem:
            return problem.errno or errno.EIO
        return 0

    def free(self, taken: int) -> None:
        if taken >= 0:
            if self._descriptors:
                self._locked(fcntl.F_UNLCK, taken)
            self._taken.discard(taken)

    @contextlib.contextmanager
    def only_one(self, path: str) -> Iterator[None]:
        taken = self.take(path)
        try:
            yield
        finally:
            self.free(taken)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
