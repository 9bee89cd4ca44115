"""The loop that keeps a run's workers alive. It acts; policy.py decides and watchdog.py judges."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sgpu.agent.failure import Failure, from_exit, from_outcome, root_cause
from sgpu.agent.hangs import Hangs
from sgpu.agent.network import ReservedPort, worker_environment
from sgpu.agent.policy import Decision, Past, decide
from sgpu.agent.recovery import Recovery
from sgpu.agent.workers import Exit, WorkerHost, ZygoteLostError, worker_name
from sgpu.contract import records
from sgpu.contract.clock import Clock
from sgpu.contract.events import emit
from sgpu.contract.heartbeat import Beat, Page, Request, WorkerState
from sgpu.contract.outcome import read_outcome
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.contract.status import State, Status

_TURN_SECONDS = 0.05
_STATUS_SECONDS = 0.5
_STOP_SECONDS = 5.0
_COLLATERAL_WAIT_SECONDS = 0.25  # the rank that caused a lost connection is seen this much later at most
_LINGER_SECONDS = 5.0  # a rank that wrote its result gets so long to leave
_CANCEL_GRACE_SECONDS = 3.0


class Supervisor:
    """One run on one node, from its first generation to its final status.

    Args:
        first_generation: above 0 where a run that had ended is resumed.
        stop_reason: asked each turn; "cancel", "preempt" (with `preempt_seconds` of grace) or None.
    """

    def __init__(
        self,
        run: RunDir,
        spec: RunSpec,
        *,
        host: WorkerHost,
        page: Page,
        clock: Clock,
        stop_reason: Callable[[], str | None],
        first_generation: int = 0,
        preempt_seconds: float = 30.0,
    ) -> None:
        self._run, self._spec, self._host, self._page, self._clock = run, spec, host, page, clock
        self._stop_reason, self._preempt_seconds = stop_reason, preempt_seconds
        self._status = Status(state="STARTING", updated=clock.wall(), started=clock.wall())
        self._generation = first_generation
        self._generation_at = clock.monotonic()
        self._running: set[int] = set()
        self._finished: dict[int, float] = {}
        self._preempted: set[int] = set()
        self._failures: list[Failure] = []
        self._first_failure_at = 0.0
        self._history: list[Past] = []
        self._committed_step = -1
        self._events_offset = 0
        self._status_at = 0.0
        self._stopping: tuple[State, float] | None = None
        self._hangs = Hangs(run, host, clock, hang_seconds=spec.restarts.hang_seconds)
        self._recovery = Recovery(run)
        self._started_at = clock.monotonic()
        self._port = ReservedPort()

    def supervise(self) -> Status:
        """Runs to the end; the final status, which is written too."""
        emit(self._run, "run_started", generation=self._generation, world_size=self._spec.world_size)
        self._write_status(force=True)
        self._start_generation(cause=None)
        while not self._status.final:
            self._notice(self._wait())
            self._write_status()
            if self._stopping is not None:
                self._finish_stopping(*self._stopping)
            elif self._out_of_time():
                self._fail(
                    self._lost(f"the run did not end within timeout_seconds={self._spec.timeout_seconds:g}"),
                    Decision(action="stop", reason="the run's own time limit"),
                )
            elif self._failures and self._settled():
                self._recover(root_cause(self._failures))
            elif len(self._finished) == self._spec.world_size and self._gone_or_lingering():
                self._end("SUCCEEDED", "every rank returned a result")
            else:
                self._answer_requests()
        self._port.close()
        return self._status

    def _out_of_time(self) -> bool:
        limit = self._spec.timeout_seconds
        return limit is not None and self._clock.monotonic() - self._started_at > limit

    def _wait(self, seconds: float = _TURN_SECONDS) -> list[Exit]:
        try:
            return self._host.wait(seconds)
        except ZygoteLostError as error:  # its workers ended with it
            self._host_lost(error)
            return []

    def _host_lost(self, error: ZygoteLostError) -> None:
        self._running.clear()
        self._add_failure(self._lost(str(error)))
        self._host.reopen()

    # ---- a generation

    def _start_generation(self, cause: str | None) -> None:
        generation, self._generation_at = self._generation, self._clock.monotonic()
        self._failures.clear()
        self._finished.clear()
        self._preempted.clear()
        self._hangs.begin(generation)
        for rank in range(self._spec.world_size):
            self._run.attempt(generation, rank).mkdir(parents=True, exist_ok=True, mode=0o700)
        if not self._host_ready():
            return
        try:
            self._start_workers(generation)
        except ZygoteLostError as error:
            self._host_lost(error)
            return
        emit(self._run, "generation_started", generation=generation, cause=cause)
        self._status = replace(
            self._status, state="RUNNING" if generation == 0 else "RESTARTING", generation=generation
        )
        self._write_status(force=True)

    def _host_ready(self) -> bool:
        """Waits for the host, which may be importing; False where the run is to end, or the host is lost, before."""
        while not self._host.ready():
            self._wait()
            self._write_status()
            if self._failures or self._stop_reason() is not None or self._out_of_time():
                return False
        return True

    def _start_workers(self, generation: int) -> None:
        self._port.close()
        self._port = ReservedPort()
        store_port = self._host.open_store(f"store{generation}")
        for rank in range(self._spec.world_size):
            environment = worker_environment(
                self._spec, self._run, rank=rank, generation=generation, store_port=store_port,
                master_port=self._port.port,
            )  # fmt: skip
            self._host.start(
                worker_name(generation, rank), rank=rank, generation=generation, environment=environment,
                log=self._run.log(generation, rank),
            )  # fmt: skip
        self._running = set(range(self._spec.world_size))

    def _notice(self, exits: list[Exit]) -> None:
        """Takes in what ended, and which ranks say that they are done."""
        for ended in exits:
            if ended.name == f"store{self._generation}":
                self._add_failure(self._lost("the rendezvous store ended"))
            for rank in list(self._running):
                if ended.name == worker_name(self._generation, rank):
                    self._running.discard(rank)
                    self._judge(rank, ended.status)
        beats = self._page.beats()
        for rank, beat in enumerate(beats):
            if beat.state is WorkerState.FINISHED and beat.generation == self._generation:
                self._judge(rank, None)
        if self._recovery.pending:
            self._read_commits()
            self._recovery.look(
                beats, generation=self._generation, committed_step=self._committed_step, now=self._clock.monotonic()
            )
        hang = self._hangs.look(beats, self._running) if not self._failures else None
        if hang is not None:
            self._add_failure(hang)

    def _judge(self, rank: int, status: int | None) -> None:
        """`status` None: the rank says that it is done, and its process may live on."""
        if rank in self._finished or any(failure.rank == rank for failure in self._failures):
            return
        outcome = read_outcome(self._run, self._generation, rank)
        if outcome is not None and outcome.kind in ("result", "preempted"):
            self._finished[rank] = self._clock.monotonic()
            if outcome.kind == "preempted":
                self._preempted.add(rank)
        elif outcome is not None:
            self._add_failure(from_outcome(outcome))
        elif status is not None and self._stopping is None:
            beat = self._page.slot(rank).read()
            step = beat.step if beat.generation == self._generation else 0  # it may have ended before its first word
            self._add_failure(
                from_exit(status, rank=rank, generation=self._generation, step=step, time=self._clock.wall())
            )

    def _add_failure(self, failure: Failure) -> None:
        if not self._failures:
            self._first_failure_at = self._clock.monotonic()
        self._failures.append(failure)

    def _settled(self) -> bool:
        """Whether the root cause is known: something that is no mere effect, or nothing else came in time."""
        if any(not failure.collateral for failure in self._failures):
            return True
        return self._clock.monotonic() - self._first_failure_at > _COLLATERAL_WAIT_SECONDS

    def _gone_or_lingering(self) -> bool:
        return not self._running or self._clock.monotonic() - max(self._finished.values()) > _LINGER_SECONDS

    # ---- after a failure

    def _recover(self, failure: Failure) -> None:
        emit(
            self._run, "failure", generation=self._generation, rank=failure.rank, step=failure.step,
            cause=failure.cause, message=failure.message,
        )  # fmt: skip
        self._host.stop_all(_STOP_SECONDS)
        self._running.clear()
        self._read_commits()
        decision = decide(
            failure, self._history, self._spec.restarts,
            committed_step=self._committed_step, jitter=random.random() / 4,
        )  # fmt: skip
        if decision.action == "stop":
            self._fail(failure, decision)
            return
        self._recovery.begin(failed_at=self._first_failure_at, beats=self._page.beats())
        self._history.append(Past(failure=failure, committed_step=self._committed_step))
        self._generation += 1
        self._status = replace(self._status, state="RESTARTING", restarts=self._status.restarts + 1)
        emit(
            self._run, "restarting", generation=self._generation, rank=failure.rank,
            from_step=max(0, self._committed_step), attempt=self._status.restarts,
            backoff_seconds=decision.wait_seconds,
        )  # fmt: skip
        self._write_status(force=True)
        self._back_off(decision.wait_seconds)
        if self._stop_reason() is not None:
            self._answer_requests()
        elif not self._out_of_time():
            self._start_generation(cause=failure.message or failure.cause)

    def _back_off(self, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        while self._clock.monotonic() < until and self._stop_reason() is None and not self._out_of_time():
            self._wait(min(_TURN_SECONDS, until - self._clock.monotonic()))

    def _read_commits(self) -> None:
        for line in records.read_from(self._run.events, self._events_offset):
            self._events_offset = line.next_offset
            # A worker may die between a commit and telling it; the next one's restoring tells it too.
            if line.record.get("kind") in ("checkpoint_committed", "restored"):
                self._committed_step = max(self._committed_step, int(line.record["step"]))

    def _fail(self, failure: Failure, decision: Decision) -> None:
        self._status = replace(self._status, failure=_described(failure, decision, len(self._history) + 1))
        self._end("FAILED", f"{failure.message or failure.cause} ({decision.reason})")

    def _lost(self, message: str) -> Failure:
        return Failure(
            kind="infrastructure", rank=None, generation=self._generation, step=self._slowest_step(),
            cause=message, message=message, time=self._clock.wall(),
        )  # fmt: skip

    # ---- being asked to end

    def _answer_requests(self) -> None:
        reason = self._stop_reason()
        if reason is None:
            return
        state: State = "CANCELLED" if reason == "cancel" else "PREEMPTED"
        grace = _CANCEL_GRACE_SECONDS if reason == "cancel" else self._preempt_seconds
        beats = self._page.beats()
        trains = all(beat.state is WorkerState.TRAINING for beat in beats)
        deadline = self._clock.monotonic() + (grace if trains else 0.0)
        stop_step = _agreed_stop(beats, self._clock.monotonic() - self._generation_at)
        for rank in range(self._spec.world_size):
            self._page.slot(rank).request(Request.SAVE_AND_STOP, stop_step=stop_step, deadline_ns=int(deadline * 1e9))
        if reason == "preempt":
            emit(self._run, "preempted", generation=self._generation, signal="SIGTERM")
        self._stopping = (state, deadline)

    def _finish_stopping(self, state: State, deadline: float) -> None:
        if self._running and not self._failures and self._clock.monotonic() < deadline:
            return
        if len(self._finished) == self._spec.world_size and not self._preempted:
            self._end("SUCCEEDED", "every rank returned a result before it could be stopped")
        else:
            self._end(state, "it was asked to stop")

    def _end(self, state: State, message: str) -> None:
        self._host.stop_all(_STOP_SECONDS)
        self._running.clear()
        emit(self._run, "run_ended", generation=self._generation, state=state, message=message)
        self._status = replace(self._status, state=state, ended=self._clock.wall())
        self._write_status(force=True)

    # ---- telling

    def _slowest_step(self) -> int:
        return min(beat.step for beat in self._page.beats())

    def _write_status(self, *, force: bool = False) -> None:
        now = self._clock.monotonic()
        if not force and now - self._status_at < _STATUS_SECONDS:
            return
        self._status_at = now
        beats = self._page.beats()
        state = self._status.state
        if state in ("STARTING", "RESTARTING") and all(
            beat.state is not WorkerState.ABSENT and beat.generation == self._generation for beat in beats
        ):
            state = "RUNNING"
        self._status = replace(
            self._status,
            state=state,
            updated=self._clock.wall(),
            step=min(beat.step for beat in beats),
            epoch=min(beat.epoch for beat in beats),
            total_steps=max((beat.total_steps for beat in beats if beat.total_steps >= 0), default=None),
        )
        self._status.write(self._run)


def _agreed_stop(beats: Sequence[Beat], seconds: float) -> int:
    """A step that no rank has passed when it reads this: as many steps ahead as half a second holds, at least one."""
    furthest = max(beat.step for beat in beats)
    per_second = max((beat.step for beat in beats), default=0) / max(seconds, 1e-3)
    return furthest + 1 + math.ceil(per_second / 2)


def _described(failure: Failure, decision: Decision, attempts: int) -> dict[str, Any]:
    return {
        "kind": failure.kind,
        "rank": failure.rank,
        "generation": failure.generation,
        "step": failure.step,
        "cause": failure.cause,
        "message": failure.message,
        "traceback": failure.traceback,
        "reason": decision.reason,
        "error": decision.error,
        "attempts": attempts,
    }
