"""The checkpoints of a root as rows: what is known at once, what a look inside tells, and why each is kept."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sgpu.checkpoint.format import names
from sgpu.checkpoint.keeping import choose, protection
from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.keeping.prune import score
from sgpu.checkpoint.stores.opening import open_store
from sgpu.checkpoint.stores.store import Store
from sgpu.contract import records
from sgpu.contract.errors import CheckpointError
from sgpu.contract.policies import CheckpointPolicy
from sgpu.metrics import names as metric_names
from sgpu.metrics import spool
from sgpu.widgets.checkpoints.place import Place
from sgpu.widgets.words import count, is_number, plain, whole

State = Literal["unchecked", "valid", "unverified", "damaged"]
_NO_METRICS = ("epoch", "batch", "step")
_OTHERS = re.compile(r"rank\d+/|system/")


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """One step.

    Attributes:
        folder: its name inside the root, of the newest attempt, or of the newest that is whole.
        state: by the cheap check; "unverified" is whole, but has no checksums (plain DCP).
        why: what is wrong with a damaged one.
        made: seconds since 1970, or None.
        blocked_seconds: training waited for it so long. `save_seconds`: until it was durable.
        kept: why it is still there, in words.
        protected: whether pruning passes it by, and `reason`, as whoever protected it said.
        metrics: at that step.
    """

    step: int
    folder: str
    state: State = "unchecked"
    why: str = ""
    made: float | None = None
    size_bytes: int | None = None
    blocked_seconds: float | None = None
    save_seconds: float | None = None
    world_size: int | None = None
    kept: tuple[str, ...] = ()
    protected: bool = False
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Events:
    """What a run's events say of its checkpoints; reads on from where it was."""

    def __init__(self, place: Place) -> None:
        self._path = place.run.events if place.run else None
        self._offset = 0
        self.committed: dict[int, dict[str, Any]] = {}
        self.committed_since: set[int] = set()  # it was restored
        self.restored_step: int | None = None

    def refresh(self) -> None:
        if self._path is None:
            return
        for line in records.read_from(self._path, self._offset):
            self._offset = line.next_offset
            step = whole(line.record.get("step"))
            if step is None:
                continue
            if line.record.get("kind") == "checkpoint_committed":
                self.committed[step] = line.record
                self.committed_since.add(step)
            elif line.record.get("kind") == "restored":
                self.restored_step = step
                self.committed_since.clear()


class Shelf:
    """All checkpoints of a root. Lists them cheaply; `check` looks inside one."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.store: Store = open_store(place.root)
        self._events = Events(place)
        self._attempts: dict[int, list[str]] = {}
        self._rows: dict[int, CheckpointRow] = {}
        self._curves: Mapping[str, Mapping[int, float]] = {}
        self._lock = threading.RLock()  # checks, actions and browsers come in different threads

    @property
    def rows(self) -> list[CheckpointRow]:
        """Newest first, each with the reasons why it is kept."""
        with self._lock:
            found = [self._rows[step] for step in sorted(self._rows, reverse=True)]
        policy = self.place.spec.checkpoints if self.place.spec else None
        few = policy is not None and len(self._events.committed_since) < policy.keep_last
        kept = reasons(found, policy, self._events.restored_step if few else None)
        return [replace(row, kept=kept[row.step]) for row in found]

    @property
    def restored_step(self) -> int | None:
        """What the run was last restored from."""
        return self._events.restored_step

    def row(self, step: int) -> CheckpointRow | None:
        return self._rows.get(step)

    def refresh(self) -> None:
        """Lists again; what was checked stays checked."""
        attempts: dict[int, list[str]] = {}
        for folder in choose.committed(self.store):
            attempts.setdefault(folder.step, []).append(folder.name)
        protected = names.protected(self.store.names(""))
        with self._lock:
            self._events.refresh()
            for step, folders in attempts.items():
                if self._attempts.get(step) != folders:
                    self._rows[step] = CheckpointRow(step=step, folder=folders[0])
                self._rows[step] = self._marked(self._told(self._rows[step]), protected.intersection(folders))
            self._rows = {step: self._rows[step] for step in attempts}
            self._attempts = attempts

    def _marked(self, row: CheckpointRow, protected: Collection[str]) -> CheckpointRow:
        if bool(protected) == row.protected:
            return row
        reason = protection.reason(self.store, min(protected)) if protected else ""
        return replace(row, protected=bool(protected), reason=plain(reason, 200))

    def check(self, step: int) -> Opened | None:
        """The cheap check of the newest attempt that is whole. None: none is, or there is no such step."""
        why = ""
        for folder in self.attempts(step):
            try:
                opened = choose.open_checkpoint(self.store, folder)
            except (CheckpointError, OSError) as error:
                why = why or plain(error, 2000)
                continue
            self._take(step, folder, opened)
            return opened
        self.mark_damaged(step, why or "it is gone")
        return None

    def _take(self, step: int, folder: str, opened: Opened) -> None:
        self._change(step, lambda row: _seen(row, folder, opened, self._curve_values(step)))

    def mark_damaged(self, step: int, why: str) -> None:
        """Every byte was compared, and some differ."""
        self._change(step, lambda row: replace(row, state="damaged", why=why))

    def attempts(self, step: int) -> list[str]:
        """Folders of a step, newest first."""
        return list(self._attempts.get(step, ()))

    def take_curves(self, curves: Mapping[str, Mapping[int, float]]) -> None:
        """Metrics of the run: name -> step -> value."""
        self._curves = curves
        for step in list(self._rows):
            self._change(step, lambda row: replace(row, metrics={**self._curve_values(row.step), **row.metrics}))

    def _change(self, step: int, change: Callable[[CheckpointRow], CheckpointRow]) -> None:
        with self._lock:
            if step in self._rows:
                self._rows[step] = change(self._rows[step])

    def _curve_values(self, step: int) -> dict[str, float]:
        return {name: values[step] for name, values in self._curves.items() if step in values}

    def _told(self, row: CheckpointRow) -> CheckpointRow:
        """With what the events say, where nothing better is known."""
        event = self._events.committed.get(row.step)
        if event is None:
            return row
        return replace(
            row,
            made=_number(event.get("time")) if row.made is None else row.made,
            blocked_seconds=_number(event.get("blocked_seconds")),
            save_seconds=_number(event.get("save_seconds")),
        )


def reasons(
    rows: Sequence[CheckpointRow], policy: CheckpointPolicy | None, resumed_from: int | None
) -> dict[int, tuple[str, ...]]:
    """Why each is kept, by the rules of the run; without a run only the newest is sure to stay. Rows newest first."""
    whole_ones = [row for row in rows if row.state != "damaged"]
    found: dict[int, list[str]] = {row.step: [] for row in rows}
    last = policy.keep_last if policy else 1
    for row in whole_ones[:last]:
        found[row.step].append("the newest" if row is whole_ones[0] else f"one of the last {count(last)}")
    for row in whole_ones:
        if policy and policy.keep_every and row.step % policy.keep_every == 0:
            found[row.step].append(f"every {count(policy.keep_every)} steps")
        if row.step == resumed_from:
            found[row.step].append("resumed from")
    for row in rows:
        if row.protected:
            found[row.step].append(f"protected ({row.reason})" if row.reason else "protected")
        if row.state == "damaged":
            found[row.step].append("damaged: left for a look")
    rule = policy.keep_best if policy else None
    for step in _best(whole_ones, rule):
        found[step].append(f"best by {plain((rule or {}).get('metric'), 40)}")
    return {step: tuple(words) for step, words in found.items()}


def _best(rows: Sequence[CheckpointRow], rule: dict[str, Any] | None) -> list[int]:
    if rule is None:
        return []
    sign = -1.0 if rule.get("mode", "min") == "max" else 1.0
    scored = [(score(dict(row.metrics), rule), row.step) for row in rows]
    ranked = sorted((sign * value, -step) for value, step in scored if value is not None and value == value)
    return [-step for _, step in ranked[: rule.get("count", 1)]]


def _seen(row: CheckpointRow, folder: str, opened: Opened, curves: Mapping[str, float]) -> CheckpointRow:
    manifest = opened.manifest
    if manifest is None:
        ends: dict[str, int] = {}
        for place in opened.index.places.values():
            ends[place.file] = max(ends.get(place.file, 0), place.offset + place.size_bytes)
        return replace(row, folder=folder, state="unverified", size_bytes=sum(ends.values()), metrics=dict(curves))
    metrics = {**curves, **metrics_of(manifest.metadata)}
    return replace(
        row, folder=folder, state="valid", why="", made=manifest.created_unix_seconds, size_bytes=manifest.size_bytes,
        world_size=manifest.world_size, metrics=metrics,
    )  # fmt: skip


def metrics_of(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Numbers that were given to `save`, themselves or under "metrics"."""
    inner = metadata.get("metrics")
    found = {name: value for name, value in metadata.items() if name not in _NO_METRICS}
    found.update(inner if isinstance(inner, dict) else {})
    return {plain(name, 60): float(value) for name, value in found.items() if is_number(value)}


def curves_of(place: Place) -> dict[str, dict[int, float]]:
    """The run's own metrics of rank 0. Reads the whole spool: seconds for a million points."""
    if place.run is None:
        return {}
    return {
        plain(name, 60): dict(points)
        for name, points in spool.series(place.run).items()
        if name not in metric_names.BUILT_IN and not _OTHERS.match(name)
    }


def unfinished(store: Store, committed: Collection[str]) -> int:
    """Folders named like a step that were never committed."""
    return sum(folder.name not in committed for folder in names.step_folders(store.names("")))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and is_number(value) else None
