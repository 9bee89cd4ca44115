"""Metrics of a run as thinned series, read from the spools as they grow.

A series keeps at most MAX_POINTS points however long the run is. Buckets are of equal width in steps, so a long run
is equally fine everywhere, and thinning again what was thinned before loses no lowest or highest value.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque

from sgpu.contract import records
from sgpu.contract.rundir import RunDir
from sgpu.widgets.snapshot import Series
from sgpu.widgets.words import count, is_number, number, whole

MAX_POINTS = 1000
MAX_SERIES = 500
_BUCKETS = 180
_LINES_A_REFRESH = 10_000  # of all ranks together; a second or so of a slow machine


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
    """One series as it grows."""

    def __init__(self, name: str, rank: int) -> None:
        self._name, self._rank = name, rank
        self._steps: list[int] = []
        self._values: list[float] = []
        self._shown: list[float | None] = []  # the same, None for what is not finite
        self._version = 0
        self._logged = 0
        self._gaps = 0
        self._first_gap = ""
        self._made: Series | None = None

    def put(self, step: int, value: float) -> None:
        """A value of a step that was seen before takes the old one's place."""
        self._made = None
        self._logged += 1
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
        if len(self._steps) > MAX_POINTS:
            self._version += 1
            stay = thin(self._steps, self._values)
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


class Spools:
    """Every rank's metrics. `refresh` reads what was appended since the last time."""

    def __init__(self, run: RunDir, world_size: int) -> None:
        self._run = run
        self._world_size = world_size
        self._offsets = [0] * world_size
        self._sizes = [0] * world_size
        self._generations = [0] * world_size
        self._buffers: dict[str, Buffer] = {}
        self._left_out: set[str] = set()
        self.pace: deque[tuple[float, int]] = deque(maxlen=64)  # (time, step) of rank 0's newest lines
        self.first: tuple[float, int] | None = None  # of its very first
        self.caught_up = True

    def refresh(self) -> None:
        self.caught_up = True
        left = _LINES_A_REFRESH
        for rank in range(self._world_size):
            left -= self._read(rank, left)

    @property
    def note(self) -> str:
        left_out = len(self._left_out)
        return f"{count(left_out)} more metric names are not charted (at most {MAX_SERIES} are)" if left_out else ""

    def series(self) -> dict[str, Series]:
        """The user's own first, then times and what the machine measures; otherwise in the order they came."""
        names = sorted(self._buffers, key=lambda name: name.endswith("_seconds") or name.startswith("system/"))
        return {name: self._buffers[name].series() for name in names}

    def _read(self, rank: int, most_lines: int) -> int:
        """How many lines were read."""
        path = self._run.spool(rank)
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            return 0
        if size == self._sizes[rank]:
            return 0
        lines = list(itertools.islice(records.read_from(path, self._offsets[rank]), most_lines))
        for line in lines:
            self._take(rank, line.record)
        if lines:
            self._offsets[rank] = lines[-1].next_offset
        if len(lines) == most_lines:
            self.caught_up = False
        else:
            self._sizes[rank] = size
        return len(lines)

    def _take(self, rank: int, record: dict[str, object]) -> None:
        step, generation, values = whole(record.get("step")), whole(record.get("generation")) or 0, record.get("values")
        if step is None or not isinstance(values, dict) or generation < self._generations[rank]:
            return  # a worker of an older generation is not believed once a newer one has spoken
        if generation > self._generations[rank]:
            self._generations[rank] = generation
            if rank == 0:
                self.pace.clear()
        moment = record.get("time")
        if rank == 0 and isinstance(moment, (int, float)) and (not self.pace or step > self.pace[-1][1]):
            self.pace.append((float(moment), step))
            self.first = self.first or self.pace[0]
        for name, value in values.items():
            if is_number(value):
                self._put(rank, name, step, value)

    def _put(self, rank: int, name: str, step: int, value: float) -> None:
        full_name = f"rank{rank}/{name}" if rank else name
        buffer = self._buffers.get(full_name)
        if buffer is None:
            if len(self._buffers) >= MAX_SERIES:
                self._left_out.add(full_name)
                return
            buffer = self._buffers[full_name] = Buffer(full_name, rank)
        try:
            buffer.put(step, float(value))
        except OverflowError:  # a whole number beyond the range of floats
            buffer.put(step, math.inf if value > 0 else -math.inf)
