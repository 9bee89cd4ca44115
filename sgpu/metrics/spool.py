"""The reading side: from files that grow to points, a bounded piece at a time."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sgpu.contract import records
from sgpu.contract.rundir import RunDir
from sgpu.metrics import derive, names
from sgpu.metrics.progress import Chunk, Point, Position, Progress

_SERIES_POINTS = 20_000


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Points in the order they were written, and the position behind them. `more`: the file goes on."""

    points: tuple[Point, ...]
    position: Position
    more: bool


def read_spool(path: pathlib.Path, rank: int, position: Position, limit_points: int) -> Piece:
    """Whole lines of one rank from `position` on, until `limit_points` are reached.

    A spool that was replaced since (another inode) is read from its start: points read twice are below their marks.
    """
    inode = _inode(path)
    start = position.offset if inode == position.inode and position.offset <= _size(path) else 0
    points: list[Point] = []
    offset, more = start, False
    for line in records.read_from(path, start):
        if len(points) >= limit_points:
            more = True
            break
        points += _points(line.record, rank)
        offset = line.next_offset
    if _inode(path) != inode:  # replaced under our hands: what was read may be of either file
        return Piece(points=(), position=Position(), more=True)
    return Piece(points=tuple(points), position=Position(inode=inode, offset=offset), more=more)


def read_events(path: pathlib.Path, offset: int, limit_points: int) -> Piece:
    """The same for events.jsonl, which only ever grows."""
    points: list[Point] = []
    for line in records.read_from(path, offset):
        if len(points) >= limit_points:
            return Piece(points=tuple(points), position=Position(offset=offset), more=True)
        points += derive.points_of(line.record)
        offset = line.next_offset
    return Piece(points=tuple(points), position=Position(offset=offset), more=False)


def read_chunk(run: RunDir, world_size: int, progress: Progress, limit_points: int) -> Chunk:
    """One piece of each file, so that no rank starves another."""
    share = max(1, limit_points // (world_size + 1))
    happened = read_events(run.events, progress.events_offset, share)
    points, spools, more = list(happened.points), {}, happened.more
    for rank in range(world_size):
        piece = read_spool(run.spool(rank), rank, progress.spools.get(rank, Position()), share)
        points += piece.points
        spools[rank] = piece.position
        more = more or piece.more
    return Chunk(points=points, spools=spools, events_offset=happened.position.offset, more=more)


def series(run: RunDir) -> dict[str, list[tuple[int, float]]]:
    """`{name: [(step, value), ...]}` of all ranks and events as MLflow has them, from the run folder alone.

    Of a step that was done again the first value counts, as in MLflow. The start of a very long run may be in MLflow
    only: a spool that reaches its limit is cut by what MLflow has.
    """
    progress, found = Progress(), dict[str, list[tuple[int, float]]]()
    ranks = [int(name[4:]) for path in run.metrics.glob("rank*.jsonl") if (name := path.stem)[4:].isdecimal()]
    more = True
    while more:
        chunk = read_chunk(run, max(ranks, default=-1) + 1, progress, _SERIES_POINTS)
        for point in progress.deliver(chunk):
            found.setdefault(point.key, []).append((point.step, point.value))
        more = chunk.more
    return found


def _points(record: dict[str, Any], rank: int) -> Iterator[Point]:
    step, time_seconds, values = record.get("step"), record.get("time"), record.get("values")
    if not isinstance(step, int) or not isinstance(time_seconds, (int, float)) or not isinstance(values, dict):
        return
    for name, value in values.items():
        if isinstance(value, (int, float)):
            yield Point(key=names.for_rank(rank, name), value=float(value), step=step, time_seconds=time_seconds)


def _inode(path: pathlib.Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


def _size(path: pathlib.Path) -> int:
    return path.stat().st_size if path.exists() else 0
