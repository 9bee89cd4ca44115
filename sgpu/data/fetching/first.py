"""The first files that a process wants: it brings them itself, many at a time, while a fetcher starts.

A fetcher takes some tenths of a second to start, in which a volume brings hundreds of files. Which of the two brings a
file is settled file by file, so that neither needs to know of the other.
"""

from __future__ import annotations

import multiprocessing.util
from collections.abc import Callable, Iterable
from functools import partial

from sgpu.data.caching.arrivals import Arrivals, Outcome
from sgpu.data.fetching.fetcher import bounds
from sgpu.data.fetching.flight import Flight
from sgpu.data.fetching.lanes import Lanes
from sgpu.data.source import Source
from sgpu.data.volumes.opening import others_are_quicker

_FILES = 512
_FILES_UNTIL_QUICKER = 64  # a fetcher that reads by obstore is there before these are
_SIZE_BYTES = 64 << 20
_LEAST_LANES = 16
_END_SECONDS = 2.0  # a mount may hang


class FirstFiles:
    """Brings files in the background until they are here, or `stop`.

    Args:
        numbers: what this reader wants, in order.
        at_least: so many come, however large they are.
        readers: processes that do the same for a loader; together they stay within what one would take.
    """

    def __init__(self, source: Source, numbers: Iterable[int], *, at_least: int, readers: int) -> None:
        most = bounds(source, at_least).flight.limit
        at_once = min(most, max(_LEAST_LANES, most // readers))
        self._lanes = Lanes(Flight(limit=at_once, least=at_once, most=at_once))
        arrivals = Arrivals(source.cache, _told, tries=1)
        files = _FILES_UNTIL_QUICKER if others_are_quicker(source.volume) else _FILES // readers
        tasks, size = list[Callable[[], int]](), 0
        for number in numbers:
            if len(tasks) >= at_least and (len(tasks) >= files or size >= _SIZE_BYTES // readers):
                break
            if not tasks and not source.waits_first(number):
                break
            size += int(source.listing.sizes[number])
            tasks.append(partial(arrivals.bring, number))
        if tasks:
            # a part file that is left behind keeps its room until somebody sweeps
            multiprocessing.util.Finalize(None, _end, (self._lanes,), exitpriority=0)
            self._lanes.submit(tasks)

    def stop(self) -> None:
        """What is on its way still comes."""
        self._lanes.drop()


def _told(number: int, outcome: Outcome) -> None:
    """Who obtains the file meets the same."""


def _end(lanes: Lanes) -> None:
    lanes.drop()
    lanes.drain(_END_SECONDS)
