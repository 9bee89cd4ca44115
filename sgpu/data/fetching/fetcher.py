"""The process that brings a rank's next files here, many at a time: `python -m sgpu.data.fetching.fetcher`.

Its standard input is all that it hears: one line of JSON, then records (version, epoch, cursor) of what the loop has
finished. It ends when that input ends, when its parent dies, on SIGTERM, or when all files are here. It never loads
torch.
"""

from __future__ import annotations

import os
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from sgpu.data.caching.arrivals import Arrivals, Outcome
from sgpu.data.fetching import child
from sgpu.data.fetching.flight import Flight
from sgpu.data.fetching.lanes import Lanes
from sgpu.data.ordering.walk import Stretch, WalkPlan, walk
from sgpu.data.source import Source

PROGRESS = struct.Struct("<qqq")  # version, epoch, cursor; shorter than PIPE_BUF, so a write is whole or not at all

_LEAST, _MOST = 8, 256  # downloads at a time
_MEMORY_BYTES = 512 << 20
_PIECE_BYTES = 32 << 20  # of a large file, in memory at a time
_REFILL = 0.75  # of the bounds: to wake a thread takes more than a file does, so that each should get several
_IDLE_SECONDS = 5.0  # a thread more for each batch of a slow loop would cost more than its files


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How far ahead of the loop to be, and how many files to have on their way.

    Attributes:
        flight: the number of files on their way: where it begins, and its bounds.
    """

    files: int
    size_bytes: int
    flight: Flight


def bounds(source: Source, batch: int) -> Bounds:
    """Latency is hidden by files on their way, up to bandwidth x latency; large files need few, and take memory."""
    mean = max(1, source.listing.total_bytes // len(source))
    limit = source.options.cache_limit_bytes
    return Bounds(
        files=max(512, 8 * batch),
        size_bytes=min(2 << 30, limit if limit is not None else 2 << 30),
        flight=Flight(
            limit=max(_LEAST, min(64, (4 << 20) // mean)),
            least=_LEAST,
            most=max(_LEAST, min(_MOST, _MEMORY_BYTES // min(mean, _PIECE_BYTES))),
        ),
    )


class Fetcher:
    """Walks ahead of what the loop has finished; a jump of the loop starts the walk anew."""

    def __init__(self, source: Source, plan: WalkPlan, limits: Bounds, version: int, epoch: int, cursor: int) -> None:
        self.source, self.plan, self.limits = source, plan, limits
        self.lanes = Lanes(limits.flight, idle_seconds=_IDLE_SECONDS)
        self._here, self._wanting = bytearray(len(source)), len(source)  # what is here stays while this process lives
        self._came = deque[int]()
        self._arrivals = Arrivals(source.cache, self._told)
        self._jump(version, epoch, cursor)

    def _jump(self, version: int, epoch: int, cursor: int) -> None:
        self.version = version
        self._walk: Iterator[Stretch] = walk(self.plan, epoch, cursor)
        self._ahead: deque[tuple[tuple[int, int], int, int]] = deque()
        self._files = self._bytes = 0

    def told(self, version: int, epoch: int, cursor: int) -> None:
        """The loop finished everything before this position."""
        if version != self.version:
            self._jump(version, epoch, cursor)
            return
        while self._ahead and self._ahead[0][0] <= (epoch, cursor):
            _, files, size = self._ahead.popleft()
            self._files -= files
            self._bytes -= size

    @property
    def is_done(self) -> bool:
        """Whether all files of the volume have been seen in the cache."""
        return self._wanting == 0

    def _is_here(self, number: int) -> bool:
        """Looks once for each file that is."""
        if not self._here[number] and self.source.cache.has(number):
            self._note(number)
        return bool(self._here[number])

    def _note(self, number: int) -> None:
        self._wanting -= not self._here[number]
        self._here[number] = True

    def fill(self) -> None:
        """Asks for files up to the bounds, once there are many to ask for; returns at once."""
        while self._came:
            self._note(self._came.popleft())
        if self._files > _REFILL * self.limits.files or self._bytes > _REFILL * self.limits.size_bytes:
            return
        tasks = list[Callable[[], int]]()
        while (
            not self.is_done
            and self._files < self.limits.files
            and (self._bytes < self.limits.size_bytes or not self._ahead)
        ):
            stretch = next(self._walk)
            size = int(self.source.listing.sizes[stretch.numbers].sum())
            self._ahead.append((stretch.end, len(stretch.numbers), size))
            self._files += len(stretch.numbers)
            self._bytes += size
            missing = (number for number in stretch.numbers.tolist() if not self._is_here(number))
            tasks += [partial(self._bring, number, self.version) for number in missing]
        if tasks:
            self.lanes.submit(tasks)

    def _bring(self, number: int, version: int) -> int:
        """Returns the bytes that came."""
        return self._arrivals.bring(number, looked=True) if version == self.version else 0

    def _told(self, number: int, outcome: Outcome) -> None:
        """Of a file that could not be read nothing: a worker that needs it meets the same, and tells the loop."""
        if outcome.here:
            self._came.append(number)


def _serve(source: Source, told: dict[str, Any]) -> None:
    plan = WalkPlan(**told["plan"])
    fetcher = Fetcher(source, plan, bounds(source, plan.batch), *told["start"])
    fetcher.fill()
    kept = b""
    while not fetcher.is_done and (received := os.read(sys.stdin.fileno(), 1 << 16)):
        kept += received
        whole = len(kept) - len(kept) % PROGRESS.size
        for record in PROGRESS.iter_unpack(kept[:whole]):
            fetcher.told(*record)
        kept = kept[whole:]
        fetcher.fill()


def main() -> None:
    told, source = child.begin()
    _serve(source, told)
    child.leave(source)


if __name__ == "__main__":
    main()
