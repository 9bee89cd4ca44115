"""From the heartbeat page to goodput: where all ranks' seconds went, and the share in which training went forward."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from sgpu.contract.heartbeat import Beat, Category, Page, last_sign_ns
from sgpu.metrics import names
from sgpu.metrics.progress import Point


@dataclass(frozen=True, kw_only=True)
class GoodputReport:
    """Where the ranks' time went.

    Attributes:
        seconds: by category (lower case names of `Category`), summed over the ranks.
        wall_seconds: of the rank that has been there longest.
        goodput: productive seconds / all seconds, 0 to 1; 0 before there are any.
        ranks: how many.
    """

    seconds: dict[str, float]
    wall_seconds: float
    goodput: float
    ranks: int

    def __str__(self) -> str:
        spent = sorted(self.seconds.items(), key=lambda item: -item[1])
        told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent if seconds >= 0.05) or "nothing yet"
        return f"goodput {self.goodput:.1%} of {self.ranks} rank(s) x {self.wall_seconds:.1f} s: {told}"


def from_beats(beats: Sequence[Beat], until_ns: int | None = None) -> GoodputReport:
    """Sums the ledgers; what is open counts up to `until_ns` (monotonic), or to the newest sign of any rank."""
    if until_ns is None and beats:
        until_ns = last_sign_ns(beats)
    ledgers = [beat.ledger_seconds(until_ns) for beat in beats]
    seconds = {c.name.lower(): sum(ledger[c.name.lower()] for ledger in ledgers) for c in Category}
    total = sum(seconds.values())
    return GoodputReport(
        seconds=seconds,
        wall_seconds=max((sum(ledger.values()) for ledger in ledgers), default=0.0),
        goodput=seconds["productive"] / total if total > 0 else 0.0,
        ranks=len(ledgers),
    )


def from_page(path: pathlib.Path, until_ns: int | None = None) -> GoodputReport:
    """As `from_beats`, from a run's heartbeat page.

    Raises:
        FileNotFoundError: the run has not got that far.
        ValueError: it is no heartbeat page of this version.
    """
    page = Page(path)
    try:
        return from_beats(page.beats(), until_ns)
    finally:
        page.close()


class PageReader:
    """The page of a run that may not have made it yet."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._page: Page | None = None

    def beats(self) -> list[Beat]:
        """Empty until there is a page.

        Raises:
            ValueError: it is no heartbeat page of this version.
        """
        if self._page is None:
            try:
                self._page = Page(self._path)
            except FileNotFoundError:
                return []
        return self._page.beats()

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None


class GoodputSeries:
    """`goodput` and the ledger by step. A step's values are held back until the next step: each step has its last."""

    def __init__(self, *, every_seconds: float) -> None:
        self._every, self._given_at = every_seconds, float("-inf")
        self._held: list[Point] = []

    def look(self, beats: Sequence[Beat], *, now_ns: int, time_seconds: float) -> list[Point]:
        """`now_ns`: monotonic. Gives points at most every so many seconds."""
        if not beats:
            return []
        before, self._held = self._held, _points(beats, now_ns, time_seconds)
        if not before or self._held[0].step <= before[0].step or now_ns / 1e9 - self._given_at < self._every:
            return []
        self._given_at = now_ns / 1e9
        return before

    def last(self, beats: Sequence[Beat], *, until_ns: int, time_seconds: float) -> list[Point]:
        """The final values."""
        return _points(beats, until_ns, time_seconds) if beats else []


def _points(beats: Sequence[Beat], until_ns: int, time_seconds: float) -> list[Point]:
    """At the step that every rank has reached."""
    report = from_beats(beats, until_ns)
    step = min(beat.high_step for beat in beats)
    values = {"goodput": report.goodput, **{names.for_ledger(name): told for name, told in report.seconds.items()}}
    return [Point(key=key, value=value, step=step, time_seconds=time_seconds) for key, value in values.items()]
