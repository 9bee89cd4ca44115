"""The events of a run as sentences, and those with a step as marks for the charts."""

from __future__ import annotations

from collections import OrderedDict, deque

from sgpu.contract import records
from sgpu.contract.rundir import RunDir
from sgpu.widgets.reading.sentences import Record, level, sentence
from sgpu.widgets.reading.snapshot import Happening, Mark, MarkKind
from sgpu.widgets.words import is_number, plural, whole

MAX_HAPPENINGS = 500
MAX_MARKS = 200  # of each kind
_MARKS: dict[str, tuple[MarkKind, str]] = {
    "checkpoint_committed": ("checkpoint", "step"),
    "resumed": ("restart", "from_step"),
    "restarting": ("restart", "from_step"),
    "failure": ("failure", "step"),
}


class Timeline:
    """`refresh` reads the events that were appended since the last time."""

    def __init__(self, run: RunDir) -> None:
        self._path = run.events
        self._offset = 0
        self._size = 0
        self._number = 0
        self._happenings: deque[Happening] = deque(maxlen=MAX_HAPPENINGS)
        self._marks: dict[MarkKind, OrderedDict[int, Mark]] = {
            "checkpoint": OrderedDict(), "restart": OrderedDict(), "failure": OrderedDict()
        }  # fmt: skip
        self.checkpoint_step: int | None = None
        self.restarts = 0
        self.bottleneck = ""
        """The newest sentence about where the time goes."""

    def refresh(self) -> None:
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size == self._size:
            return
        self._size = size
        for line in records.read_from(self._path, self._offset):
            if line.record.get("kind") != "epoch_ended" or line.record.get("rank") in (None, 0):  # each rank says it
                self._take(line.record)
            self._offset = line.next_offset

    @property
    def happenings(self) -> tuple[Happening, ...]:
        return tuple(self._happenings)

    @property
    def earlier(self) -> int:
        """How many happenings were dropped since they are old."""
        return self._number - len(self._happenings)

    @property
    def marks(self) -> tuple[Mark, ...]:
        return tuple(mark for marks in self._marks.values() for mark in marks.values())

    def _take(self, record: Record) -> None:
        kind, moment = str(record.get("kind")), record.get("time")
        self._happenings.append(
            Happening(
                number=self._number,
                time=float(moment) if isinstance(moment, (int, float)) and is_number(moment) else 0.0,
                kind=kind,
                level=level(record),
                sentence=sentence(record),
            )
        )
        self._number += 1
        if kind == "checkpoint_committed" and whole(record.get("step")) is not None:
            self.checkpoint_step = max(self.checkpoint_step or 0, record["step"])
        if kind == "bottleneck":
            self.bottleneck = sentence(record)
        if kind == "restarting":
            self.restarts += 1
        self._mark(record)

    def _mark(self, record: Record) -> None:
        kind, key = _MARKS.get(str(record.get("kind")), ("checkpoint", ""))
        step = whole(record.get(key))
        if step is None:
            return
        marks = self._marks[kind]
        marks.pop(step, None)
        marks[step] = Mark(kind=kind, step=step, label=sentence(record))
        if len(marks) > MAX_MARKS:
            marks.popitem(last=False)


def tried(restarts: int, reason: str) -> str:
    """What was done against failures before the run gave up, and why it did."""
    words = f"{plural(restarts, 'restart')} before this" if restarts else "no restart before this"
    return f"{words} ({reason})" if reason else words
