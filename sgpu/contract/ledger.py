"""Where a rank's seconds went: the arithmetic, apart from where it is kept (the heartbeat page).

One category is open at a time, and a second belongs to exactly one, so that the parts sum to wall time. A writer that
is killed leaves its category open: what follows its last sign is charged by whoever notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum


class Category(IntEnum):
    """Where a second of a rank went. The parts sum to its wall time."""

    STARTING = 0
    PRODUCTIVE = 1
    DATA = 2
    CHECKPOINT = 3
    RESTORING = 4
    RESTARTING = 5
    RECOMPUTING = 6
    IDLE = 7


class Ledger:
    """Seconds by category. Times are monotonic nanoseconds.

    Attributes:
        category: the open one.
        since_ns: from when on it is open.
        started_ns: when the ledger was begun.
        closed: nothing is open; the time since then is nobody's.
    """

    def __init__(
        self, category: Category, since_ns: int, started_ns: int, seconds: Sequence[float], closed: bool
    ) -> None:
        self.category, self.since_ns, self.started_ns = category, since_ns, started_ns
        self.seconds, self.closed = list(seconds), closed

    def turn(self, category: Category, now_ns: int) -> None:
        """What is open ends; from now on, seconds go to `category`."""
        if not self.closed:
            self.seconds[self.category] += max(0, now_ns - self.since_ns) / 1e9
        self.category, self.since_ns, self.closed = category, now_ns, False

    def lapse(self, now_ns: int, *, heard_ns: int, rest: Category) -> None:
        """Nothing was heard since `heard_ns`: from then on, and until it turns again, seconds are `rest`."""
        if not self.closed:
            self.turn(rest, min(max(heard_ns, self.since_ns), max(now_ns, self.since_ns)))
        self.turn(rest, now_ns)

    def close(self, now_ns: int) -> None:
        self.turn(self.category, now_ns)
        self.closed = True


def parts(
    seconds: Sequence[float], category: Category, *, since_ns: int, until_ns: int | None, closed: bool
) -> dict[str, float]:
    """Seconds by category name (lower case), what is open counted up to `until_ns`; None: not at all."""
    found = {each.name.lower(): seconds[each] for each in Category}
    if until_ns is not None and not closed:
        found[category.name.lower()] += max(0.0, (until_ns - since_ns) / 1e9)
    return found
