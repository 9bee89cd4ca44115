"""A volume's files, asked for again where that may help."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

from sgpu import runtime
from sgpu.contract.errors import FetchError
from sgpu.contract.failpoint import failpoint
from sgpu.data.caching.room import is_disk_full
from sgpu.data.caching.sums import crc_of
from sgpu.data.measuring.counters import Counters
from sgpu.data.volumes.entry import Entry, Volume

TRIES = 5
_BACKOFF_SECONDS = 0.1
_LONGEST_BACKOFF_SECONDS = 5.0
_HARD_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

T = TypeVar("T")


class Reading:
    """Retries with full jitter; what cannot get better by waiting is not retried.

    Both ways of reading raise FetchError (it could not be read), ListingChangedError (it is not the file that was
    listed), or an OSError that says that there is no room where the bytes should go.
    """

    def __init__(self, volume: Volume, counters: Counters) -> None:
        self._volume, self._counters = volume, counters

    def body(self, entry: Entry, tries: int = TRIES) -> bytes:
        """All of a file, in memory."""
        return self._tried(entry, lambda: self._volume.body(entry), tries)

    def copy(self, entry: Entry, descriptor: int, tries: int = TRIES) -> int:
        """Into an open file of its size, with the time of the file's last change. Returns the CRC-32C."""
        crc = self._tried(entry, lambda: self._volume.copy(entry, descriptor), tries)
        dated(descriptor, entry)
        return crc_of(descriptor) if crc is None else crc

    def _tried(self, entry: Entry, ask: Callable[[], T], most: int) -> T:
        tries = 0
        while True:
            tries += 1
            try:
                failpoint("data.copy")
                came = ask()
            except OSError as problem:
                if is_disk_full(problem):
                    raise
                if tries == most or isinstance(problem, _HARD_ERRORS):
                    raise self.failed(entry, problem, tries) from problem
                self._counters.add(retries=1)
                time.sleep(random.uniform(0, min(_LONGEST_BACKOFF_SECONDS, _BACKOFF_SECONDS * 4 ** (tries - 1))))
            else:
                self._counters.add(downloads=1, downloaded_bytes=entry.size_bytes)
                return came

    def failed(self, entry: Entry, problem: OSError, tries: int) -> FetchError:
        rank, url = runtime.rank(), self._volume.url
        return FetchError(
            f"rank {rank} could not read {entry.path} of volume {url} after {tries} "
            f"{'try' if tries == 1 else 'tries'}: {type(problem).__name__}: {problem}. Check that the file can be read "
            "and that the volume is reachable; leave a broken file out by pattern.",
            url=url, path=entry.path, rank=rank,
        )  # fmt: skip


def dated(descriptor: int, entry: Entry) -> None:
    """Gives a copy the time of the file's last change, by which it is known again."""
    os.utime(descriptor, ns=(time.time_ns(), entry.stamp * 1000))
