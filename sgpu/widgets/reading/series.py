"""One metric of a run as a thinned series.

A series keeps at most MAX_POINTS points however long the run is. Buckets are of equal width in steps, so a long run
is equally fine everywhere, and thinning again what was thinned before loses no lowest or highest value.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence

from sgpu.widgets.reading.snapshot import Series
from sgpu.widgets.words import count, number

MAX_POINTS = 1000
_BUCKETS = 180


def thin(steps: list[int], values: list[float], buckets: int = _BUCKETS) -> list[int]:
    """Which points stay: of each bucket its first and last, its lowest and highest, and its first that is not finite.

    A bucket is 1, 2, 4, 8, ... steps wide and begins at a multiple of that, so that thinning again either changes
    nothing or joins whole buckets.

    Args:
        steps: strictly increasing, not empty.
        values: one a step.
        buckets: at most so many, of the narrowest width for which they are enough.

    Returns:
        Indices in order, at most 5 a bucket.
    """
    shift = 0
    while (steps[-1] >> shift) - (steps[0] >> shift) >= buckets:
        shift += 1
    stay: set[int] = set()
    for _, group in itertools.groupby(range(len(steps)), key=lambda index: steps[index] >> shift):
        inside = list(group)
        finite = [index for index in inside if math.isfinite(values[index])]
        stay.update((inside[0], inside[-1]))
        if finite:
            stay.update((min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)))
        if len(finite) < len(inside):
            stay.add(next(index for index in inside if not math.isfinite(values[index])))
    return sorted(stay)


class Buffer:
    """One series as it grows. Keeps at most `most_points` of it."""

    def __init__(self, name: str, rank: int, *, most_points: int = MAX_POINTS) -> None:
        self._name, self._rank, self._most_points = name, rank, most_points
        self._steps: list[int] = []
        self._values: list[float] = []
        self._shown: list[float | None] = []  # the same, None for what is not finite
        self._version = 0
        self._logged = 0
        self._gaps = 0
        self._first_gap = ""
        self._begin: int | None = None  # the lowest step that was put
        self._before = (0, 0)  # points, and gaps among them, that were put before it
        self._made: Series | None = None

    @property
    def empty(self) -> bool:
        return not self._steps

    def put(self, step: int, value: float) -> None:
        """A value of a step that was seen before takes the old one's place."""
        self._made = None
        self._logged += 1
        self._begin = step if self._begin is None else min(step, self._begin)
        shown: float | None = value
        if not math.isfinite(value):
            shown = None
            self._gaps += 1
            self._first_gap = self._first_gap or f"{number(value)} at step {count(step)}"
        if not self._steps or step > self._steps[-1]:
            self._steps.append(step)
            self._values.append(value)
            self._shown.append(shown)
        else:
            self._version += 1
            at = bisect.bisect_left(self._steps, step)
            seen = 1 if self._steps[at] == step else 0
            self._steps[at : at + seen], self._values[at : at + seen] = [step], [value]
            self._shown[at : at + seen] = [shown]
        self._thin()

    def put_before(self, points: Sequence[tuple[int, float]]) -> bool:
        """Points of steps before those that were `put`, in order, perhaps thinned elsewhere; whether there are any.

        They take the place of what was put before here earlier.
        """
        earlier = [(step, value) for step, value in points if self._begin is None or step < self._begin]
        if not earlier:
            return False
        broken = [(step, value) for step, value in earlier if not math.isfinite(value)]
        if broken:
            self._first_gap = f"{number(broken[0][1])} at step {count(broken[0][0])}"
        self._made = None
        self._version += 1
        self._logged += len(earlier) - self._before[0]
        self._gaps += len(broken) - self._before[1]
        self._before = (len(earlier), len(broken))
        until = len(self._steps) if self._begin is None else bisect.bisect_left(self._steps, self._begin)
        self._steps[:until] = [step for step, _ in earlier]
        self._values[:until] = [value for _, value in earlier]
        self._shown[:until] = [value if math.isfinite(value) else None for _, value in earlier]
        self._thin()
        return True

    def _thin(self) -> None:
        if len(self._steps) <= self._most_points:
            return
        self._version += 1
        stay = thin(self._steps, self._values, _BUCKETS * self._most_points // MAX_POINTS)
        self._steps = [self._steps[index] for index in stay]
        self._values = [self._values[index] for index in stay]
        self._shown = [self._shown[index] for index in stay]

    def series(self) -> Series:
        """The same object as long as nothing was put."""
        if self._made is None:
            gaps, first = self._gaps, self._first_gap
            few = (
                f"1 value is not finite ({first})"
                if gaps == 1
                else f"{count(gaps)} values are not finite (first: {first})"
            )
            self._made = Series(
                name=self._name,
                rank=self._rank,
                steps=tuple(self._steps),
                values=tuple(self._shown),
                version=self._version,
                logged=self._logged,
                latest=number(self._values[-1]),
                note=few if gaps else "",
            )
        return self._made
