"""Tells when a restarted run trains again: the seconds that a failure cost, and the steps that are done twice."""

from __future__ import annotations

from collections.abc import Sequence

from sgpu.agent.supervising.report import Commits
from sgpu.contract.events import emit
from sgpu.contract.heartbeat import Beat, Category
from sgpu.contract.rundir import RunDir

_TRAINS = (Category.DATA, Category.PRODUCTIVE, Category.RECOMPUTING, Category.CHECKPOINT)


class Recovery:
    """Waits for the first step of every rank after a restart, and tells it once."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._since: float | None = None
        self._reached = 0

    def begin(self, *, failed_at: float, beats: Sequence[Beat]) -> None:
        """A generation has failed. `failed_at` is monotonic; a failure while recovering does not reset it."""
        self._since = failed_at if self._since is None else self._since
        self._reached = max(beat.high_step for beat in beats)

    def look(self, beats: Sequence[Beat], *, generation: int, commits: Commits, now: float) -> None:
        """A rank trains again once it is beyond the newest of `commits`, which is what it restored."""
        if self._since is None:
            return
        from_step = max(0, commits.newest())
        if not all(
            beat.generation == generation and beat.category in _TRAINS and beat.step > from_step for beat in beats
        ):
            return
        emit(
            self._run, "resumed", generation=generation, from_step=from_step, seconds=now - self._since,
            recomputed_steps=max(0, self._reached - from_step),
        )  # fmt: skip
        self._since = None
