"""The loop that brings a run's metrics to MLflow while the run lasts, and closes the MLflow run after it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sgpu.contract import events
from sgpu.contract.clock import Clock
from sgpu.contract.heartbeat import Beat
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import Status, read_status
from sgpu.metrics import facts, keepsakes
from sgpu.metrics.delivery import Delivery
from sgpu.metrics.ledger import GoodputReport, GoodputSeries, PageReader, from_beats
from sgpu.metrics.machine import Sampler
from sgpu.metrics.progress import Point
from sgpu.metrics.supervisor import DeadlinePassed, Parent, Signals, agent_alive
from sgpu.metrics.writer import RunStatus, TrackingDownError, TrackingRefusedError, Writer

_T = TypeVar("_T")

_STATUS: dict[str, RunStatus] = {
    "SUCCEEDED": "FINISHED", "FAILED": "FAILED", "LOST": "FAILED", "CANCELLED": "KILLED", "PREEMPTED": "KILLED",
}  # fmt: skip
_LONGEST_PAUSE_SECONDS = 15.0
_LONGEST_PAUSE_AT_END_SECONDS = 2.0
_GOODPUT_SECONDS = 10.0
_COMPLAINT_SECONDS = 10.0


class Forwarder:
    """The loop. `serve` returns the exit code."""

    def __init__(
        self,
        run: RunDir,
        *,
        world_size: int,
        writer: Writer,
        sampler: Sampler,
        parent: Parent,
        signals: Signals,
        clock: Clock,
        drain_seconds: float,
        period_seconds: float = 1.0,
    ) -> None:
        self._run, self._writer, self._sampler, self._parent = run, writer, sampler, parent
        self._signals, self._clock, self._drain, self._period = signals, clock, drain_seconds, period_seconds
        self._page = PageReader(run.heartbeat)
        self._goodput = GoodputSeries(every_seconds=_GOODPUT_SECONDS)
        self._extra: list[Point] = []
        self._delivery = Delivery(run, world_size=world_size, writer=writer, sampled=self._sampled)
        self._failures = 0
        self._trouble = self._refusal = self._page_trouble = ""
        self._complained_at = float("-inf")

    def serve(self) -> int:
        """Until the run has ended and MLflow has everything, or cannot be had.

        Returns:
            0: all delivered. 1: something was lost, and a `metrics_lost` event says what.
        """
        self._sampler.start()
        try:
            while not self._ending():
                self._signals.wait(self._run_turn(), self._parent)
            if not self._signals.asked_to_end:
                self._signals.set_deadline(self._drain)
            self._sampler.stop()
            if self._refusal:
                return self._give_up(self._refusal)
            self._extra += self._last_goodput()
            self._insist(self._delivery.turn)
            while not self._delivery.idle:
                self._insist(self._delivery.turn)
            self._insist(self._finish)
            self._signals.clear_deadline()
            self._complain(at_once=True)
            return 0
        except DeadlinePassed:
            return self._give_up(self._trouble or "the tracking server did not answer in time")
        except TrackingRefusedError as error:
            return self._give_up(str(error))
        finally:
            self._signals.clear_deadline()
            self._sampler.stop()
            self._page.close()

    def _run_turn(self) -> float:
        """One turn while the run is on; how long to wait for the next, in seconds."""
        self._extra += self._goodput.look(self._beats(), now_ns=time.monotonic_ns(), time_seconds=self._clock.wall())
        if self._refusal:  # nothing more can be written; at the end of the run, what is lost is counted
            return self._period
        try:
            more = self._delivery.turn()
        except TrackingDownError as error:
            return self._down(error, _LONGEST_PAUSE_SECONDS)
        except TrackingRefusedError as error:
            self._refusal = str(error)
            self._tell("warning", {"message": f"MLflow takes no more metrics of this run: {error}"})
            return self._period
        self._failures = 0
        self._complain()
        return 0.0 if more else self._period

    def _insist(self, call: Callable[[], _T]) -> _T:
        """Again and again until it works or the deadline passes."""
        while True:
            try:
                result = call()
            except TrackingDownError as error:
                self._signals.wait(self._down(error, _LONGEST_PAUSE_AT_END_SECONDS), self._parent)
                continue
            self._failures = 0
            return result

    def _down(self, error: TrackingDownError, longest_seconds: float) -> float:
        self._trouble = str(error)
        if self._failures == 0:
            print(
                f"{time.strftime('%F %T')} MLflow does not answer, trying again: {error}", file=sys.stderr, flush=True
            )
        pause = min(longest_seconds, 0.5 * 2 ** min(self._failures, 10))
        self._failures += 1
        return float(pause)

    def _ending(self) -> bool:
        self._parent.look()
        if self._signals.asked_to_end or self._parent.gone:
            return True
        status = read_status(self._run)
        if status is not None and status.final:
            return True
        return self._parent.pid is None and self._run.agent.exists() and not agent_alive(self._run)

    def _outcome(self) -> tuple[Status | None, RunStatus | None]:
        """How MLflow should show the run: None leaves it running, for whoever carries on."""
        vanished = (self._parent.gone or self._parent.pid is None) and not agent_alive(self._run)
        status = read_status(self._run)  # after the look at the agent, which writes its last word before it ends
        if status is not None and status.final:
            return status, _STATUS[status.state]
        return status, "FAILED" if vanished else None

    def _finish(self) -> None:
        status, shown = self._outcome()
        if shown is None:
            return
        tags = facts.closing_tags(status, self._report(status).seconds) | facts.bottleneck(self._run)
        if status is None or not status.final:
            tags["sgpu.failure"] = "supervisor vanished: the process that kept the run alive is gone without a result"
        ended = status.ended if status is not None and status.ended is not None else self._clock.wall()
        self._writer.finish(shown, ended_seconds=ended, tags=tags)
        try:
            for name, text in keepsakes.texts(self._run):
                self._writer.save_text(name, text)
        except (TrackingDownError, TrackingRefusedError) as error:  # the run's figures and status are safe
            self._tell("warning", {"message": f"logs and events were not copied to MLflow: {error}"})

    def _beats(self) -> list[Beat]:
        """Empty while there is no page, and for good where it cannot be read."""
        if self._page_trouble:
            return []
        try:
            return self._page.beats()
        except ValueError as error:
            self._page_trouble = str(error)
            self._tell("warning", {"message": f"no goodput: {error}"})
            return []

    def _until_ns(self, status: Status | None) -> int:
        """The end of the run on the monotonic clock; now where there is none."""
        now = time.monotonic_ns()
        if status is None or status.ended is None:
            return now
        return now - max(0, int((self._clock.wall() - status.ended) * 1e9))

    def _report(self, status: Status | None) -> GoodputReport:
        return from_beats(self._beats(), self._until_ns(status))

    def _last_goodput(self) -> list[Point]:
        until = self._until_ns(read_status(self._run))
        return self._goodput.last(self._beats(), until_ns=until, time_seconds=self._clock.wall())

    def _sampled(self, most: int) -> list[Point]:
        taken, self._extra = self._extra, []
        return [*taken, *self._sampler.take(most)]

    def _complain(self, *, at_once: bool = False) -> None:
        """Tells what the server refused and what could not be kept, not too often."""
        count = self._delivery.refused + self._sampler.missed
        if count == 0 or (not at_once and self._clock.monotonic() - self._complained_at < _COMPLAINT_SECONDS):
            return
        self._complained_at = self._clock.monotonic()
        cause = self._delivery.refusal or "machine samples came faster than MLflow took them"
        self._delivery.refused, self._sampler.missed = 0, 0
        self._tell("metrics_lost", {"count": count, "cause": cause})

    def _give_up(self, cause: str) -> int:
        self._signals.clear_deadline()
        self._complain(at_once=True)
        count = self._delivery.count_left()
        self._tell(
            "metrics_lost", {"count": count, "cause": f"not delivered to MLflow, nor was the final state: {cause}"}
        )
        _note(f"gave up with {count} points undelivered: {cause}")
        return 1

    def _tell(self, kind: str, told: dict[str, Any]) -> None:
        status = read_status(self._run)
        try:
            events.emit(self._run, kind, generation=status.generation if status else 0, **told)
        except OSError as error:  # the disk is full: this process's log may still take it, and the run must not suffer
            _note(f"{kind}: {told} (not in events.jsonl: {error})")


def _note(text: str) -> None:
    print(f"{time.strftime('%F %T')} {text}", file=sys.stderr, flush=True)
