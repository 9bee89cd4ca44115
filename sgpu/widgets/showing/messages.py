"""From Snapshots to what travels to the browser: everything once, then only what changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgpu.widgets.reading.machines import state_words
from sgpu.widgets.reading.snapshot import LogTail, Series, Snapshot, Usage
from sgpu.widgets.showing import text
from sgpu.widgets.words import STATE_WORDS, count, percent, plain, plural, rate, seconds, size, workers

Message = dict[str, Any]


class Messages:
    """What the browser has been told. A message says what to keep of that and what to add.

    Attributes:
        chart_rank: whose metrics are charted.
        log_rank: whose log is shown; None: the first (the failing rank, or rank 0).
        usage_node: whose figures are charted.
    """

    def __init__(self) -> None:
        self.chart_rank = 0
        self.log_rank: int | None = None
        self.usage_node = 0
        self._number = 0
        self._forget()

    def _forget(self) -> None:
        self._head: Message = {}
        self._marks: list[list[Any]] = []
        self._series: dict[str, Series] = {}
        self._usage: dict[tuple[int | None, str], Usage] = {}
        self._next_happening = 0
        self._log: LogTail | None = None

    def message(
        self, snapshot: Snapshot, *, full: bool = False, view: Mapping[str, Any] | None = None
    ) -> Message | None:
        """The next message, or None where nothing changed.

        Args:
            full: tell everything, to a browser that may have missed something.
            view: facts of the view itself, shown in the head.
        """
        if full:
            self._forget()
        told: Message = {}
        head = {**head_of(snapshot), **(view or {})}
        if head != self._head:
            self._head = told["head"] = head
        marks = [[mark.kind, mark.step] for mark in snapshot.marks]
        if marks != self._marks:
            self._marks = told["marks"] = marks
        if series := self._new_points(snapshot):
            told["series"] = series
        if usage := self._new_usage(snapshot):
            told["usage"] = usage
        if happenings := self._new_happenings(snapshot):
            told["events"] = happenings
        if (log := self._new_lines(snapshot)) is not None:
            told["log"] = log
        if not told and not full:
            return None
        self._number += 1
        return {"kind": "update", "number": self._number, "full": full, **told}

    def _new_points(self, snapshot: Snapshot) -> list[Message]:
        told = []
        for name, series in snapshot.series.items():
            before = self._series.get(name)
            if series.rank != self.chart_rank or series is before:
                continue
            self._series[name] = series
            told.append({"name": name, **_points(series, before), "latest": series.latest, "note": series.note})
        return told

    def _new_usage(self, snapshot: Snapshot) -> list[Message]:
        told = []
        for one in snapshot.usage:
            before = self._usage.get((one.rank, one.figure))
            if one.node != self.usage_node or one is before:
                continue
            self._usage[one.rank, one.figure] = one
            told.append(
                {
                    "name": f"{'node' if one.rank is None else one.rank}/{one.figure}", "rank": one.rank,
                    "figure": one.figure, "label": one.label, "unit": one.unit, "now": one.now, "highest": one.highest,
                    **_points(one.series, before.series if before else None),
                }
            )  # fmt: skip
        return told

    def _new_happenings(self, snapshot: Snapshot) -> list[Message]:
        new = [happening for happening in snapshot.happenings if happening.number >= self._next_happening]
        if new:
            self._next_happening = new[-1].number + 1
        return [
            {
                "number": happening.number,
                "at": text.stamp(snapshot, happening),
                "level": happening.level,
                "text": happening.sentence,
            }
            for happening in new
        ]

    def _new_lines(self, snapshot: Snapshot) -> Message | None:
        wanted = [log for log in snapshot.logs if log.rank == self.log_rank] or list(snapshot.logs[:1])
        if not wanted or wanted[0] is self._log:
            return None
        log, before, self._log = wanted[0], self._log, wanted[0]
        start = log.first_line
        if before is not None and before.rank == log.rank:
            start = max(start, before.first_line + _same(before, log))
        return {
            "rank": log.rank,
            "path": log.path,
            "size": size(log.size_bytes),
            "first": log.first_line,
            "from": start,
            "lines": list(log.lines[start - log.first_line :]),
        }


def _points(series: Series, before: Series | None) -> Message:
    """What to keep of the points that were told, and what to add."""
    keep = len(before.steps) if before is not None and before.version == series.version else 0
    values = [_short(value) for value in series.values[keep:]]
    return {"keep": keep, "steps": list(series.steps[keep:]), "values": values}


def _same(before: LogTail, log: LogTail) -> int:
    """How many lines of `before`, from its front, need not be sent again: all but its last, which may have changed.

    Only the last line of a tail ever changes.
    """
    last = len(before.lines) - 1
    at = before.first_line + last - log.first_line
    unchanged = 0 <= at < len(log.lines) and last >= 0 and before.lines[last] == log.lines[at]
    return max(0, last + 1 if unchanged else last)


def _short(value: float | None) -> float | None:
    """Six digits are more than a chart shows, and half the bytes."""
    return None if value is None else float(f"{value:.6g}")


def head_of(snapshot: Snapshot) -> Message:
    """The part of the view that is small and changes all the time, in words."""
    progress = snapshot.step / snapshot.total_steps if snapshot.total_steps else None
    return {
        "name": plain(snapshot.name, 120),
        "id": snapshot.id,
        "folder": snapshot.folder,
        "state": snapshot.state,
        "state_words": STATE_WORDS.get(snapshot.state, snapshot.state.lower()),
        "final": snapshot.final,
        "elapsed": seconds(snapshot.elapsed_seconds),
        "step": _step_words(snapshot),
        "resumable": resumable(snapshot),
        "progress": None if progress is None else round(min(1.0, progress), 4),
        "rate": rate(snapshot.steps_per_second) if snapshot.steps_per_second else "",
        "left": "" if snapshot.eta_seconds is None else f"{seconds(snapshot.eta_seconds)} left",
        "workers": workers(snapshot.workers, snapshot.accelerator, snapshot.nodes),
        "restarts": plural(snapshot.restarts, "restart") if snapshot.restarts else "",
        "goodput": _goodput(snapshot),
        "failure": _failure(snapshot),
        "tracking": _tracking(snapshot),
        "ranks": list(range(snapshot.world_size)),
        "log_ranks": [log.rank for log in snapshot.logs],
        "failed_rank": snapshot.failure.rank if snapshot.failure else None,
        "earlier_events": snapshot.earlier_happenings,
        "machines": [
            [
                machine.node,
                machine.state,
                state_words(machine),
                machine.address,
                machine.ranks,
                "" if machine.step is None else count(machine.step),
            ]
            for machine in snapshot.machines
        ],
        "usage_nodes": sorted({one.node for one in snapshot.usage}),
        "note": snapshot.note,
    }


def resumable(snapshot: Snapshot) -> bool:
    """Whether the run has ended, and can go on."""
    return snapshot.final and snapshot.state in ("FAILED", "CANCELLED", "PREEMPTED", "LOST")


def _step_words(snapshot: Snapshot) -> str:
    if not snapshot.step and not snapshot.total_steps:
        return ""
    return f"step {count(snapshot.step)}" + (f" / {count(snapshot.total_steps)}" if snapshot.total_steps else "")


def _goodput(snapshot: Snapshot) -> Message | None:
    goodput = snapshot.goodput
    if goodput is None:
        return None
    parts = [
        {"name": part.name, "label": part.label, "share": round(part.share, 4), "words": percent(part.share)}
        for part in goodput.parts
        if part.share >= 0.0005
    ]
    return {"sentence": goodput.sentence, "advice": goodput.advice, "parts": parts}


def _failure(snapshot: Snapshot) -> Message | None:
    if snapshot.failure is None:
        return None
    first, *rest = text.failure_lines(snapshot.failure, snapshot.id)
    return {"title": first, "traceback": snapshot.failure.traceback.rstrip(), "tried": rest[-1]}


def _tracking(snapshot: Snapshot) -> Message | None:
    if snapshot.tracking is None:
        return None
    return {"url": snapshot.tracking.url, "command": snapshot.tracking.command}
