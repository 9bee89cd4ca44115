"""Metrics of a run, read from the spools as they grow; of a long run from their ends, and the rest from MLflow."""

from __future__ import annotations

import itertools
import math
from collections import deque

from sgpu.contract import records
from sgpu.contract.rundir import RunDir
from sgpu.metrics.mlflow_reader import MetricPoint
from sgpu.widgets.past import CUT_STEPS, LONG_BYTES, TAIL_BYTES, Past, first_step, tail_offset
from sgpu.widgets.series import Buffer
from sgpu.widgets.snapshot import Series
from sgpu.widgets.words import count, is_number, whole

MAX_SERIES = 500
_LINES_A_REFRESH = 10_000  # of all ranks together; a second or so of a slow machine


class Spools:
    """Every rank's metrics. `refresh` reads what was appended since the last time.

    Args:
        past: what a run measured before the ends of its spools; asked for where the spools are long, or were cut.
    """

    def __init__(self, run: RunDir, world_size: int, past: Past | None = None) -> None:
        self._run = run
        self._world_size = world_size
        self._past = past
        self._began = False
        self._missing = False  # whether the beginning is still to come from elsewhere
        self._from_past: int | None = None
        self._begin([0] * world_size)

    def _begin(self, offsets: list[int]) -> None:
        self._offsets = offsets
        self._sizes = [0] * self._world_size
        self._generations = [0] * self._world_size
        self._buffers: dict[str, Buffer] = {}
        self._left_out: set[str] = set()
        self.pace: deque[tuple[float, int]] = deque(maxlen=64)  # (time, step) of rank 0's newest lines
        self.first: tuple[float, int] | None = None  # of its very first
        self.caught_up = True

    def refresh(self) -> None:
        if not self._began:
            self._open()
        self.caught_up = True
        left = _LINES_A_REFRESH
        for rank in range(self._world_size):
            left -= self._read(rank, left)
        if self._missing and self.caught_up:
            self._take_past()

    def _open(self) -> None:
        """Begins at the ends of long spools, if the rest can come from elsewhere."""
        paths = [self._run.spool(rank) for rank in range(self._world_size)]
        if not any(path.exists() for path in paths):
            return
        self._began = True
        if self._past is None:
            return
        ends = [tail_offset(path, LONG_BYTES, TAIL_BYTES) for path in paths]
        if (any(ends) or first_step(paths[0]) > CUT_STEPS) and self._past.ask():
            self._missing = True
            self._begin(ends)

    def _take_past(self) -> None:
        assert self._past is not None  # or nothing would be missing
        found = self._past.take()
        if found is None:
            self.caught_up = False
            return
        self._missing = False
        if not found and any(self._offsets):
            self._begin([0] * self._world_size)  # MLflow has nothing to tell: all of the spools then
            self.caught_up = False
            return
        for name, points in found.items():
            rank, _, own = name.partition("/")
            number = rank.removeprefix("rank") if own and rank.startswith("rank") else ""
            buffer = self._buffer(name, int(number) if number.isdecimal() else 0)
            if buffer is not None and buffer.put_before([(point.step, point.value) for point in points]):
                self._noted(points[0])

    def _noted(self, point: MetricPoint) -> None:
        if self.first is None or point.time_seconds < self.first[0]:
            self._from_past = self._from_past or (self.first[1] if self.first else point.step)
            self.first = (point.time_seconds, point.step)

    @property
    def note(self) -> str:
        left_out = len(self._left_out)
        told = f"{count(left_out)} more metric names are not charted (at most {MAX_SERIES} are)" if left_out else ""
        if self._missing:
            told = "; ".join(filter(None, ["the beginning of the charts is being read from MLflow", told]))
        elif self._from_past is not None:
            earlier = f"metrics before step {count(self._from_past)} are as MLflow thins them"
            told = "; ".join(filter(None, [earlier, told]))
        return told

    def series(self) -> dict[str, Series]:
        """The user's own first, then times and what the machine measures; otherwise in the order they came."""
        filled = [name for name, buffer in self._buffers.items() if not buffer.empty]
        names = sorted(filled, key=lambda name: name.endswith("_seconds") or name.startswith("system/"))
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
        buffer = self._buffer(f"rank{rank}/{name}" if rank else name, rank)
        if buffer is None:
            return
        try:
            buffer.put(step, float(value))
        except OverflowError:  # a whole number beyond the range of floats
            buffer.put(step, math.inf if value > 0 else -math.inf)

    def _buffer(self, full_name: str, rank: int) -> Buffer | None:
        """None where there are too many."""
        buffer = self._buffers.get(full_name)
        if buffer is None:
            if len(self._buffers) >= MAX_SERIES:
                self._left_out.add(full_name)
                return None
            buffer = self._buffers[full_name] = Buffer(full_name, rank)
        return buffer
