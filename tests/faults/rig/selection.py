"""Which cells CI runs: every kind in every phase of a run, and every class of kinds at every moment."""

from __future__ import annotations

from collections.abc import Iterable

from tests.faults.rig.cells import Cell, all_cells

PHASES = {
    "before training": ("submit", "boot", "first batch", "half a file fetched"),
    "training": ("before all-reduce", "between backward and step"),
    "saving": ("staging", "half a shard", "before commit", "before prune", "pruning"),
    "starting again": ("restore", "during a restart"),
    "ending": ("epoch's edge", "before the result", "flush of metrics"),
}
CLASSES = {
    "ends": ("SIGKILL", "exception", "exit 0", "several ranks killed"),
    "is told to end": ("SIGTERM", "SIGINT"),
    "stands still": ("SIGSTOP", "held GIL"),
    "disk": ("disk full", "I/O error once", "I/O error for good", "slow I/O", "corrupt bytes"),
    "the world": ("remote 5xx", "clock jump", "launcher killed"),
}
LEAST = 92
_SLOW_KINDS = CLASSES["stands still"]
_SLOW_MOMENTS = ("submit",)  # a run that nobody started is told as lost after ten seconds


def _of(groups: dict[str, tuple[str, ...]], member: str) -> str:
    return next(name for name, members in groups.items() if member in members)


def pairs(cell: Cell) -> set[tuple[str, str]]:
    """What a cell covers."""
    kind, moment = cell.kind.name, cell.moment.name
    return {(kind, _of(PHASES, moment)), (_of(CLASSES, kind), moment)}


def sensible() -> list[Cell]:
    return [cell for cell in all_cells() if not cell.why_not]


def _is_slow(cell: Cell) -> bool:
    return cell.kind.name in _SLOW_KINDS or cell.moment.name in _SLOW_MOMENTS


def in_ci() -> list[Cell]:
    """Chosen greedily, so always the same; filled up to `LEAST` with cells that are quick."""
    left = sensible()
    missing = set().union(*map(pairs, left))
    chosen: list[Cell] = []
    while missing:
        best = max(left, key=lambda cell: (len(pairs(cell) & missing), not _is_slow(cell)))
        chosen.append(best)
        left.remove(best)
        missing -= pairs(best)
    seen: dict[str, int] = {}
    for cell in chosen:
        seen[cell.moment.name] = seen.get(cell.moment.name, 0) + 1
    quick = [cell for cell in left if not _is_slow(cell)]
    while len(chosen) < LEAST:  # where there are fewest
        cell = min(quick, key=lambda each: seen[each.moment.name])
        quick.remove(cell)
        chosen.append(cell)
        seen[cell.moment.name] += 1
    names = {cell.name for cell in chosen}
    return [cell for cell in sensible() if cell.name in names]


def by_moment(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.moment.name, []).append(cell)
    return found
