"""Ranks that hold the others up: slower than the group, window after window, where no rank waits for another."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sgpu.contract.heartbeat import Beat, Category, WorkerState

_RATIO = 1.3
_LEAST_SHARE = 0.05  # of a step: less holds nobody up
_WINDOW_STEPS, _WINDOW_SECONDS = 20, 2.0
_WINDOWS, _NEEDED = 5, 3


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank in one window, or in most of the last ones.

    Attributes:
        data_seconds: what it waited for data, a step.
        ratio: to the median of all ranks.
    """

    rank: int
    step: int
    data_seconds: float
    ratio: float


def slow_ranks(before: Sequence[Beat], after: Sequence[Beat]) -> list[Slow]:
    """Those whose wait for data in a window is well above the group's.

    Only the wait for data is a rank's own in synchronous training: a step's time is the same on all, since they wait
    for the slowest in its collectives. Of an even number of ranks the lower middle one is the median.
    """
    pairs = list(zip(before, after, strict=True))
    waits = [_data_seconds(first, last) / (last.step - first.step) for first, last in pairs]
    steps = [(last.beat_ns - first.beat_ns) / 1e9 / (last.step - first.step) for first, last in pairs]
    middle = statistics.median_low(waits)
    return [
        Slow(rank=rank, step=after[rank].step, data_seconds=wait, ratio=wait / max(middle, 1e-6))
        for rank, wait in enumerate(waits)
        if wait > _RATIO * middle and wait - middle > _LEAST_SHARE * steps[rank]
    ]


class Stragglers:
    """Order of calls: `begin` per generation, then `look` each turn."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, generation: int) -> None:
        self._generation = generation
        self._first: list[Beat] | None = None
        self._past: deque[list[Slow]] = deque(maxlen=_WINDOWS)
        self._named: set[int] = set()

    def look(self, beats: Sequence[Beat]) -> list[Slow]:
        """Ranks that have become stragglers: slow in 3 of the last 5 windows. `ratio` is the middle one of those."""
        if len(beats) < 2 or any(
            b.state is not WorkerState.TRAINING or b.generation != self._generation for b in beats
        ):
            self._first = None
            return []
        if self._first is None:
            self._first = list(beats)
            return []
        if not all(_far_enough(first, last) for first, last in zip(self._first, beats, strict=True)):
            return []
        self._past.append(slow_ranks(self._first, beats))
        self._first = list(beats)
        return self._judge()

    def _judge(self) -> list[Slow]:
        found = []
        for last in self._past[-1]:
            seen = [slow for window in self._past for slow in window if slow.rank == last.rank]
            if len(seen) >= _NEEDED and last.rank not in self._named:
                found.append(replace(last, ratio=statistics.median(slow.ratio for slow in seen)))
        slow_yet = {slow.rank for window in self._past for slow in window}
        self._named = (self._named & slow_yet) | {slow.rank for slow in found}  # who recovers may be named again
        return found


def _far_enough(first: Beat, last: Beat) -> bool:
    return last.step - first.step >= _WINDOW_STEPS and last.beat_ns - first.beat_ns >= _WINDOW_SECONDS * 1e9


def _data_seconds(first: Beat, last: Beat) -> float:
    return max(0.0, last.seconds[Category.DATA] - first.seconds[Category.DATA])
