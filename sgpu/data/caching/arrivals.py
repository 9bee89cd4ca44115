"""Small files on their way into a cache, many at a time.

Threads read them, and one of these stores what all have read. Each call that a thread makes lets go of Python's lock
and must queue for it again: where each stored its own file, a hundred threads spent more time in that queue than on
files.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from crc32c import crc32c

from sgpu.contract.errors import DataError
from sgpu.data.caching.cache import Cache
from sgpu.data.caching.reading import TRIES, dated
from sgpu.data.caching.room import Part, is_disk_full
from sgpu.data.caching.sums import Sum
from sgpu.data.volumes.entry import CHUNK_BYTES, Entry, write_all

_AT_ONCE = 16  # so many wait to be stored before those who read more must wait, too


class Outcome(NamedTuple):
    """Of a file that was asked for.

    Attributes:
        here: it is in the cache; else there was no room, or a problem.
    """

    here: bool
    problem: str = ""


class _Came(NamedTuple):
    """A file's bytes.

    Attributes:
        is_new: nothing is in its place.
        taken: what keeps others from bringing it, too.
    """

    number: int
    entry: Entry
    path: str
    body: bytes
    is_new: bool
    taken: int


class Arrivals:
    """Brings files into a cache, for any number of threads.

    Args:
        tell: hears of each file once, on any of the threads. Of what is wrong it hears, too: nothing is raised.
    """

    def __init__(self, cache: Cache, tell: Callable[[int, Outcome], None], tries: int = TRIES) -> None:
        self._cache, self._tell, self._tries = cache, tell, tries
        self._waiting = deque[_Came]()
        self._storing = threading.Lock()

    def bring(self, number: int, *, looked: bool = False) -> int:
        """Returns the bytes that came. Once all threads have returned all is stored.

        Args:
            looked: the file was not here a moment ago.
        """
        cache = self._cache
        size = int(cache.listing.sizes[number])
        try:
            if not looked and cache.has(number):
                self._tell(number, Outcome(True))
                return 0
            if size >= CHUNK_BYTES or not cache.room.has_plenty(size):
                came = cache.bring(number, self._tries)
                self._tell(number, Outcome(came is not None))
                return came or 0
            if not self._read(number):
                self._tell(number, Outcome(True))
                return 0
        except (DataError, OSError) as problem:
            self._tell(number, Outcome(False, str(problem)))
            return 0
        # who leaves a file to another thread does so before that one looks for the last time
        while self._waiting and self._storing.acquire(blocking=len(self._waiting) >= _AT_ONCE):
            try:
                self._store()
            finally:
                self._storing.release()
        return size

    def _read(self, number: int) -> bool:
        """False: it is here."""
        cache = self._cache
        path = cache.local(number)
        taken = cache.flights.take(path)
        came: _Came | None = None
        try:
            is_new = not os.path.lexists(path)
            if is_new or not cache.is_here(path, number):
                entry = cache.listing.entry(number)
                came = _Came(number, entry, path, cache.reading.body(entry, self._tries), is_new, taken)
        finally:
            if came is None:
                cache.flights.free(taken)
        if came is not None:
            self._waiting.append(came)
        return came is not None

    def _store(self) -> None:
        some = [self._waiting.popleft() for _ in range(min(len(self._waiting), _AT_ONCE))]
        outcomes = dict.fromkeys((came.number for came in some), Outcome(False))
        try:
            self._put_into_cache(some, outcomes)
        except OSError as problem:  # of the cache itself
            outcomes = {
                number: told if told.here else Outcome(False, str(problem)) for number, told in outcomes.items()
            }
        finally:
            for came in some:
                self._cache.flights.free(came.taken)
                self._tell(came.number, outcomes[came.number])

    def _put_into_cache(self, some: Sequence[_Came], outcomes: dict[int, Outcome]) -> None:
        cache = self._cache
        parts = cache.room.reserve_all([came.entry.size_bytes for came in some])
        reserved = ((came, part) for came, part in zip(some, parts, strict=True) if part is not None)
        written = deque((came, part) for came, part in reserved if self._tried(came, part, _write, outcomes))
        try:
            cache.sums.add_all(
                (cache.key(came.entry), Sum(came.entry.size_bytes, came.entry.stamp, crc32c(came.body)))
                for came, _ in written
            )
            with cache.room.turn():
                while written:
                    came, part = written.popleft()
                    if self._tried(came, part, self._publish, outcomes):
                        outcomes[came.number] = Outcome(True)
        finally:
            for came, part in written:
                cache.room.release(part.path, came.entry.size_bytes)

    def _publish(self, came: _Came, part: Part) -> None:
        self._cache.publish(part, came.path, came.entry.size_bytes, is_new=came.is_new)

    def _tried(self, came: _Came, part: Part, act: Callable[[_Came, Part], None], outcomes: dict[int, Outcome]) -> bool:
        """One file's trouble is its own. What does not come gives its room back."""
        try:
            act(came, part)
        except OSError as problem:
            self._cache.room.release(part.path, came.entry.size_bytes)
            outcomes[came.number] = Outcome(False, "" if is_disk_full(problem) else str(problem))
            return False
        return True


def _write(came: _Came, part: Part) -> None:
    try:
        write_all(part.descriptor, came.body)
        dated(part.descriptor, came.entry)
    finally:
        os.close(part.descriptor)
