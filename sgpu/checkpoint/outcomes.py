"""How saves ended: reports for who asks, and the failure that the next call raises."""

from __future__ import annotations

import logging

from sgpu.checkpoint.background import Flight
from sgpu.checkpoint.helper.writers import Writer
from sgpu.checkpoint.live.stage import CHANGED
from sgpu.checkpoint.reports import SaveReport
from sgpu.contract.clock import Clock
from sgpu.contract.errors import CheckpointSaveError
from sgpu.contract.policies import CheckpointPolicy

log = logging.getLogger("sgpu.checkpoint")


class Outcomes:
    """
    Args:
        url: of the root.
        policy: whether a failure is raised, or told in the report alone.
        writer: tells what was not copied to another node.
        clock: monotonic.
        forgiving: that the state was changed too early is never raised; it is noted in `changed_early`.
    """

    def __init__(self, url: str, policy: CheckpointPolicy, writer: Writer, clock: Clock, *, forgiving: bool) -> None:
        self.changed_early = False
        self._url = url
        self._policy = policy
        self._writer = writer
        self._clock = clock
        self._forgiving = forgiving
        self._reports: list[SaveReport] = []
        self._error: CheckpointSaveError | None = None
        self._committed: set[int] = set()

    def not_staged(self, failure: CheckpointSaveError, started: float) -> None:
        """Raises it, or notes it."""
        if self._policy.on_error == "raise":
            raise failure
        seconds = self._clock.monotonic() - started
        self._reports.append(
            SaveReport(
                step=failure.step, path=failure.path, blocked_seconds=seconds, save_seconds=seconds, size_bytes=0,
                error=str(failure),
            )
        )  # fmt: skip
        log.error("%s", failure)

    def settle(self, flight: Flight, *, in_save: bool) -> None:
        """Waits for a save and notes how it ended. One that waits for it within a save counts that as its own."""
        waited_from = self._clock.monotonic()
        error = flight.work.exception()
        now = self._clock.monotonic()
        finished = now if error is not None else flight.work.result()
        if error is not None and not isinstance(error, CheckpointSaveError):
            raise error
        waited = 0.0 if in_save else max(0.0, min(finished, now) - waited_from)
        copies = self._writer.not_copied()
        self._reports.append(
            SaveReport(
                step=flight.step,
                path=f"{self._url}/{flight.folder}",
                blocked_seconds=flight.blocked_seconds + waited,
                save_seconds=finished - flight.started,
                size_bytes=flight.size_bytes,
                error=None if error is None else str(error),
                not_copied=copies.count,
                copy_error=copies.error or (self._writer.alone if self._policy.peer_memory else None),
            )
        )
        if error is None:
            self._committed.add(flight.step)
        else:
            log.error("%s", error)
            if self._forgiving and CHANGED in str(error):
                self.changed_early = True
            elif self._policy.on_error == "raise" and self._error is None:
                self._error = error

    def kept(self, restored_from: str | None, step: int) -> tuple[str, ...]:
        """The one resumed from, unless this run has `keep_last` of its own once `step` is committed."""
        enough = len(self._committed | {step}) >= self._policy.keep_last
        return () if enough or restored_from is None else (restored_from,)

    def take_reports(self) -> list[SaveReport]:
        reports, self._reports = self._reports, []
        return reports

    def raise_error(self) -> None:
        """The first failure since this was asked last."""
        error, self._error = self._error, None
        if error is not None:
            raise error
