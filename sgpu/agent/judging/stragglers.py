"""Ranks that hold the others up: slower than the group, window after window, where no rank waits for another."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sgpu.contract.beat import Beat, Category, WorkerState

_RATIO = 1.3
_LEAST_SHARE = 0.05  # of a step: less holds nobody up
_WINDOW_STEPS, _WINDOW_SECONDS = 20, 2.0
_WINDOWS, _NEEDED = 5, 3

Part = Literal["data", "compute"]


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A rank in one window, or in most of the last ones.

    Attributes:
        section: what it takes longer for: "data", its wait for the loader, or "compute", its own part of the steps.
        seconds: that it takes for it, a step.
        ratio: to the median of all ranks.
    """

    rank: int
    step: int
    section: Part
    seconds: float
    ratio: float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """One rank in one window, in seconds a step.

    Attributes:
        data: the mean: loaders with several workers are waited for in bursts.
        compute: the median of what was seen from turn to turn; 0: the rank cannot tell.
    """

    step: int
    whole: float
    data: float
    compute: float


def slow_ranks(paces: Sequence[Pace]) -> list[Slow]:
    """Those that are well above the group in a window.

    Only the wait for data and the own part of a step are a rank's own in synchronous training: a step's time is the
    same on all, since they wait for the slowest in its collectives. Of an even number of ranks the lower middle one is
    the median.
    """
    found = []
    parts: dict[Part, list[float]] = {
        "data": [pace.data for pace in paces],
        "compute": [pace.compute for pace in paces] if all(pace.compute > 0 for pace in paces) else [],
    }
    for part, values in parts.items():
        middle = statistics.median_low(values) if values else 0.0
        for rank, seconds in enumerate(values):
            if seconds > _RATIO * middle and seconds - middle > _LEAST_SHARE * paces[rank].whole:
                ratio = seconds / max(middle, 1e-6)
                found.append(Slow(rank=rank, step=paces[rank].step, section=part, seconds=seconds, ratio=ratio))
    return found


@dataclass(kw_only=True)
class _Window:
    """What was seen of one rank since its window began."""

    first: Beat
    last: Beat
    computes: list[float] = field(default_factory=list)

    def see(self, beat: Beat) -> None:
        steps = beat.step - self.last.step
        if steps > 0:
            self.computes.append((beat.work_seconds - self.last.work_seconds) / steps)
            self.last = beat

    @property
    def full(self) -> bool:
        return self.steps >= _WINDOW_STEPS and self.last.beat_ns - self.first.beat_ns >= _WINDOW_SECONDS * 1e9

    @property
    def steps(self) -> int:
        return self.last.step - self.first.step

    def pace(self) -> Pace:
        data = max(0.0, self.last.seconds[Category.DATA] - self.first.seconds[Category.DATA])
        return Pace(
            step=self.last.step, whole=(self.last.beat_ns - self.first.beat_ns) / 1e9 / self.steps,
            data=data / self.steps, compute=statistics.median(self.computes),
        )  # fmt: skip


class Stragglers:
    """Order of calls: `begin` per generation, then `look` each turn."""

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, generation: int) -> None:
        self._generation = generation
        self._windows: list[_Window] = []
        self._past: deque[list[Slow]] = deque(maxlen=_WINDOWS)
        self._named: set[tuple[int, Part]] = set()

    def look(self, beats: Sequence[Beat]) -> list[Slow]:
        """Ranks that have become stragglers: slow in 3 of the last 5 windows. `ratio` is the middle one of those."""
        if len(beats) < 2 or any(
            b.state is not WorkerState.TRAINING or b.generation != self._generation for b in beats
        ):
            self._windows = []
            return []
        if not self._windows:
            self._windows = [_Window(first=beat, last=beat) for beat in beats]
            return []
        for window, beat in zip(self._windows, beats, strict=True):
            window.see(beat)
        if not all(window.full for window in self._windows):
            return []
        self._past.append(slow_ranks([window.pace() for window in self._windows]))
        self._windows = [_Window(first=window.last, last=window.last) for window in self._windows]
        return self._judge()

    def _judge(self) -> list[Slow]:
        found = []
        for last in self._past[-1]:
            seen = [slow for window in self._past for slow in window if _what(slow) == _what(last)]
            if len(seen) >= _NEEDED and _what(last) not in self._named:
                found.append(replace(last, ratio=statistics.median(slow.ratio for slow in seen)))
        slow_yet = {_what(slow) for window in self._past for slow in window}
        self._named = (self._named & slow_yet) | {_what(slow) for slow in found}  # who recovers may be named again
        return found


def _what(slow: Slow) -> tuple[int, Part]:
    return slow.rank, slow.section
