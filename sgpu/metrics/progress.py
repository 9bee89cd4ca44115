"""How far MLflow has what the run wrote: kept by the forwarder after each batch that MLflow took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from sgpu.contract import atomic
from sgpu.contract.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in a spool file. The inode tells a spool that was cut at its front (see Recorder) from the one before."""

    inode: int = 0
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of one metric, under the name that MLflow knows it by."""

    key: str
    value: float
    step: int
    time_seconds: float


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What comes next from all files of a run, and where each stands behind it. `more`: there is more by now."""

    points: list[Point]
    spools: dict[int, Position]
    events_offset: int
    more: bool


@dataclass(kw_only=True)
class Progress:
    """Positions behind what was delivered, and the last step of each metric.

    Attributes:
        run_id: MLflow's; a state that belongs to another run is not believed.
        spools: by rank.
        events_offset: in events.jsonl.
        marks: the last step delivered, by metric key. A point at or below its mark is one that was done again.
    """

    run_id: str = ""
    spools: dict[int, Position] = field(default_factory=dict)
    events_offset: int = 0
    marks: dict[str, int] = field(default_factory=dict)

    def write(self, run: RunDir) -> None:
        atomic.write_json(run.forwarder, asdict(self), durable=False)

    def raise_marks(self, marks: dict[str, int]) -> None:
        for key, step in marks.items():
            self.marks[key] = max(step, self.marks.get(key, step))

    def fresh(self, points: Iterable[Point]) -> list[Point]:
        """Those above their marks; of several for the same metric and step, the first. Nothing is marked yet."""
        seen: dict[str, int] = {}
        new = []
        for point in points:
            if point.step > seen.get(point.key, self.marks.get(point.key, -1)):
                seen[point.key] = point.step
                new.append(point)
        return new

    def move(self, chunk: Chunk) -> None:
        """All of a chunk is delivered."""
        self.spools |= chunk.spools
        self.events_offset = chunk.events_offset

    def deliver(self, chunk: Chunk) -> list[Point]:
        """The fresh points of a chunk, marked and left behind: for a reader that cannot fail."""
        points = self.fresh(chunk.points)
        self.raise_marks({point.key: point.step for point in points})
        self.move(chunk)
        return points


def read(run: RunDir) -> Progress:
    """What was kept; the very start where there is nothing, or nothing whole (it may be lost with the machine)."""
    try:
        value: Any = atomic.read_json(run.forwarder)
        if value is None:
            return Progress()
        return Progress(
            run_id=str(value["run_id"]),
            spools={int(rank): Position(**position) for rank, position in value["spools"].items()},
            events_offset=int(value["events_offset"]),
            marks={str(key): int(step) for key, step in value["marks"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return Progress()
