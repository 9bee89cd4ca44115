"""What the supervisor leaves in the run folder for others to read: status.json; and what it reads there of commits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sgpu.agent.judging.failure import Failure
from sgpu.agent.judging.policy import Decision
from sgpu.agent.workers import WorkerHost
from sgpu.contract import records
from sgpu.contract.clock import Clock
from sgpu.contract.heartbeat import Page, WorkerState
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import State, Status

_STATUS_SECONDS = 0.5


class Report:
    """Keeps `status` and writes it, often enough to be looked at and not more often."""

    def __init__(self, run: RunDir, page: Page, host: WorkerHost, clock: Clock) -> None:
        self._run, self._page, self._host, self._clock = run, page, host, clock
        now = clock.wall()
        self.status = Status(state="STARTING", updated=now, started=now, world_size=page.world_size)
        self._written_at = 0.0

    def starting(self, generation: int, world_size: int) -> None:
        state: State = "RUNNING" if generation == 0 else "RESTARTING"
        self.status = replace(self.status, state=state, generation=generation, world_size=world_size)
        self.write(force=True)

    def restarting(self) -> None:
        self.status = replace(self.status, state="RESTARTING", restarts=self.status.restarts + 1)
        self.write(force=True)

    def failed(self, failure: Failure, decision: Decision, attempts: int) -> None:
        """Notes why; `ended` follows."""
        self.status = replace(self.status, failure=_described(failure, decision, attempts))

    def ended(self, state: State) -> None:
        self.status = replace(self.status, state=state, ended=self._clock.wall())
        self.write(force=True)

    def write(self, *, force: bool = False) -> None:
        now = self._clock.monotonic()
        if not force and now - self._written_at < _STATUS_SECONDS:
            return
        self._written_at = now
        status = self.status
        beats = self._page.beats()[: status.world_size]
        state = status.state
        if state in ("STARTING", "RESTARTING") and all(
            beat.state is not WorkerState.ABSENT and beat.generation == status.generation for beat in beats
        ):
            state = "RUNNING"
        self.status = replace(
            status,
            state=state,
            updated=self._clock.wall(),
            step=min(beat.step for beat in beats),
            epoch=min(beat.epoch for beat in beats),
            total_steps=max((beat.total_steps for beat in beats if beat.total_steps >= 0), default=None),
            nodes=self._host.nodes(),
        )
        try:
            self.status.write(self._run)
        except OSError:
            if force:
                raise
            # It only tells how far the run is, and is written anew in half a second.


class Commits:
    """The newest committed step, as the run's events tell it; -1: none."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._offset = 0
        self._step = -1

    def newest(self) -> int:
        for line in records.read_from(self._run.events, self._offset):
            self._offset = line.next_offset
            # A worker may die between a commit and telling it; the next one's restoring tells it too.
            if line.record.get("kind") in ("checkpoint_committed", "restored"):
                self._step = max(self._step, int(line.record["step"]))
        return self._step


def _described(failure: Failure, decision: Decision, attempts: int) -> dict[str, Any]:
    return {
        "kind": failure.kind,
        "rank": failure.rank,
        "node": failure.node,
        "generation": failure.generation,
        "step": failure.step,
        "cause": failure.cause,
        "message": failure.message,
        "traceback": failure.traceback,
        "reason": decision.reason,
        "error": decision.error,
        "attempts": attempts,
    }
