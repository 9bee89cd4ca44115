"""Metrics of a run, read from the spools as they grow."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections import deque

from sgpu.contract import records
from sgpu.contract.rundir import RunDir
from sgpu.metrics.mlflow_reader import MetricPoint
from sgpu.widgets.reading import preview
from sgpu.widgets.reading.past import Past
from sgpu.widgets.reading.series import Buffer
from sgpu.widgets.reading.snapshot import Series
from sgpu.widgets.words import count, is_number, whole

MAX_SERIES = 500
CUT_STEPS = 1000  # a spool that begins later was cut at its front, or its run began at a checkpoint
_LINES_A_REFRESH = 10_000  # of all ranks together; a second or so of a slow machine


class Spools:
    """Every rank's metrics. `refresh` reads what was appended since the last time.

    Of a long spool a preview is shown until all of it is read.

    Args:
        past: what a run measured before its spools begin; asked for where they were cut.
    """

    def __init__(self, run: RunDir, world_size: int, past: Past | None = None) -> None:
        self._run = run
        self._world_size = world_size
        self._past = past
        self._past_from: int | None = None
        self._opened = False
        self._preview: Spools | None = None
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
        if not self._opened and self._open():
            self.caught_up = False  # the preview is shown before anything else is read
            return
        left = _LINES_A_REFRESH
        for rank in range(self._world_size):
            left -= self._read(rank, left)
        if self.caught_up:
            self._preview = None
        if self._past is not None and not self._past.over:
            self._take_past(self._past)

    def _open(self) -> bool:
        """Whether the spools are so long that a preview is made of them."""
        sizes = {rank: _size(self._run.spool(rank)) for rank in range(self._world_size)}
        if not any(sizes.values()):
            return False
        self._opened = True
        first = next(iter(records.read_from(self._run.spool(0))), None)
        if self._past is not None and first is not None and (whole(first.record.get("step")) or 0) > CUT_STEPS:
            self._past.ask()
        if sum(sizes.values()) < preview.LONG_BYTES:
            return False
        self._preview = Spools(self._run, self._world_size)
        filled = {rank: size for rank, size in sizes.items() if size}
        for rank, size in filled.items():
            for record in preview.lines(self._run.spool(rank), size, len(filled)):
                self._preview._take(rank, record)
        return True

    def _take_past(self, past: Past) -> None:
        for name, points in past.take():
            rank, _, own = name.partition("/")
            number = rank.removeprefix("rank") if own and rank.startswith("rank") else ""
            earlier = [(point.step, point.value) for point in points]
            for spools in (self, self._preview):
                buffer = spools._buffer(name, int(number) if number.isdecimal() else 0) if spools else None
                if buffer is not None and buffer.put_before(earlier):
                    self._noted(points[0])
        self.caught_up = self.caught_up and past.over

    def _noted(self, point: MetricPoint) -> None:
        if self.first is None or point.time_seconds < self.first[0]:
            self._past_from = self._past_from or (self.first[1] if self.first else None)
            self.first = (point.time_seconds, point.step)

    @property
    def note(self) -> str:
        told = []
        if self._past is not None and not self._past.over:
            told.append("the beginning of the charts is being read from MLflow")
        elif self._past_from is not None:
            told.append(f"metrics before step {count(self._past_from)} are as MLflow thins them")
        if self._preview is not None:
            told.append("the charts are a sample until all metrics are read")
        if self._left_out:
            told.append(f"{count(len(self._left_out))} more metric names are not charted (at most {MAX_SERIES} are)")
        return "; ".join(told)

    def series(self) -> dict[str, Series]:
        """The user's own first, then times and what the machine measures; otherwise in the order they came."""
        if self._preview is not None:
            return self._preview.series()
        filled = [name for name, buffer in self._buffers.items() if not buffer.empty]
        names = sorted(filled, key=lambda name: name.endswith("_seconds") or name.startswith("system/"))
        return {name: self._buffers[name].series() for name in names}

    def _read(self, rank: int, most_lines: int) -> int:
        """How many lines were read."""
        path = self._run.spool(rank)
        size = _size(path)
        if size == self._sizes[rank]:
            return 0
        if size < self._offsets[rank]:  # cut at its front: what is left was not in MLflow yet
            self._offsets[rank] = 0
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


def _size(path: pathlib.Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
