"""The loop that keeps a run's workers alive. It acts; policy.py decides and watchdog.py judges."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from sgpu.agent.judging.failure import Failure
from sgpu.agent.judging.hangs import Hangs
from sgpu.agent.judging.policy import Decision, History
from sgpu.agent.judging.stragglers import Stragglers
from sgpu.agent.notices import Notice
from sgpu.agent.preemption import grace_seconds
from sgpu.agent.supervising import stopping
from sgpu.agent.supervising.crew import Crew
from sgpu.agent.supervising.generation import Generation
from sgpu.agent.supervising.recovery import Recovery
from sgpu.agent.supervising.report import Commits, Report
from sgpu.agent.supervising.stopping import Stopping
from sgpu.agent.workers import Exit, HostLostError, WorkerHost, worker_name
from sgpu.contract.clock import Clock
from sgpu.contract.events import emit
from sgpu.contract.heartbeat import Beat, Page, WorkerState
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.contract.status import State, Status

_TURN_SECONDS = 0.05
_PARK_TURN_SECONDS = 0.01  # somebody waits for each of them
_OVER = (WorkerState.FINISHED, WorkerState.FAILED, WorkerState.PARKED)


class Supervisor:
    """One run, from its first generation to its final status.

    Args:
        page: of all ranks, wherever they are.
        address: of this node, where workers find each other.
        first_generation: above 0 where a run that had ended is resumed.
        stop_reason: asked each turn; "cancel", "preempt" (by `notice`, or with `preempt_seconds` of grace) or None.
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
        notice: Callable[[], Notice | None] = lambda: None,
        address: str = "127.0.0.1",
        first_generation: int = 0,
        preempt_seconds: float = 30.0,
    ) -> None:
        self._run, self._spec, self._host, self._page, self._clock = run, spec, host, page, clock
        self._stop_reason, self._notice_of = stop_reason, notice
        self._preempt_seconds = preempt_seconds
        self._crew = Crew(run, spec, host, address=address)
        self._generation = Generation(run, first_generation, spec.world_size, clock)
        self._history = History(spec.restarts)
        self._stopping: Stopping | None = None
        self._report = Report(run, page, host, clock)
        self._commits = Commits(run)
        self._hangs = Hangs(run, host, clock, spec.restarts)
        self._recovery, self._stragglers = Recovery(run), Stragglers()
        self._started_at = clock.monotonic()

    def _beats(self) -> list[Beat]:
        """Of the ranks of this generation."""
        return self._page.beats()[: self._generation.world_size]

    def supervise(self) -> Status:
        """Runs to the end; the final status, which is written too."""
        emit(
            self._run, "run_started", generation=self._generation.number, world_size=self._spec.world_size,
            nodes=self._spec.nodes,
        )  # fmt: skip
        self._report.write(force=True)
        self._start_generation(self._generation.number, cause=None)
        while not self._report.status.final:
            self._notice(self._wait())
            self._report.write()
            if self._stopping is not None:
                self._finish_stopping(self._stopping)
            elif self._out_of_time():
                late = self._lost(f"the run did not end within timeout_seconds={self._spec.timeout_seconds:g}")
                self._fail(replace(late, kind="timeout"), Decision(action="stop", reason="the run's own time limit"))
            elif self._generation.failures and self._stop_reason() == "preempt":
                self._ask_to_stop("preempt")  # that may be what ended the worker, and nothing is begun anew here
            elif self._generation.settled:
                self._recover(self._generation.root_cause)
            elif self._generation.all_finished and self._generation.gone_or_lingering:
                self._end("SUCCEEDED", "every rank returned a result")
            elif self._can_grow():
                self._ask_to_stop("resize")
            else:
                self._answer_requests()
        self._crew.close()
        return self._report.status

    def _out_of_time(self) -> bool:
        limit = self._spec.timeout_seconds
        return limit is not None and self._clock.monotonic() - self._started_at > limit

    def _wait(self, seconds: float = _TURN_SECONDS) -> list[Exit]:
        try:
            return self._host.wait(seconds)
        except HostLostError as error:
            self._host_lost(error)
            return []

    def _host_lost(self, error: HostLostError) -> None:
        """Its workers ended with it, and what others are left cannot go on without them."""
        lost = self._lost(str(error), node=error.facts.get("node"))
        self._generation.add(replace(lost, unrecoverable=error.unrecoverable))
        self._crew.lose(error.facts.get("node", 0), self._generation.running)
        self._host.reopen()

    # ---- a generation

    def _start_generation(self, number: int, cause: str | None) -> None:
        before = self._generation.world_size
        self._generation = Generation(self._run, number, before, self._clock)
        self._hangs.begin(number)
        self._stragglers.begin(number)
        members = self._wait_for_members()
        if not members:
            return
        try:
            each = self._host.room(self._spec.gpus_per_node)
            live = replace(self._spec, world_size=len(members) * each, gpus_per_node=each)
            self._generation.world_size = live.world_size
            self._crew.start(number, live, members)
        except HostLostError as error:
            self._host_lost(error)
            return
        self._generation.running = set(range(live.world_size))
        emit(self._run, "generation_started", generation=number, cause=cause)
        if live.world_size != before:
            for rank in range(live.world_size, self._spec.world_size):
                self._page.slot(rank).leave()
            emit(self._run, "resized", generation=number, from_world_size=before, to_world_size=live.world_size)
        self._report.starting(number, live.world_size)

    def _wait_for_members(self) -> tuple[int, ...]:
        """The nodes that take part: all, or those that are left if that is enough (`min_gpus`).

        Empty where the run is to end, or the host is lost, before they are ready: it may be importing.
        """
        fewest = self._spec.restarts.min_gpus
        while not self._host.ready():
            members = self._host.members()
            if fewest is not None and len(members) * self._spec.gpus_per_node >= fewest:
                return members
            self._wait()
            self._report.write()
            if self._generation.failures or self._stop_reason() is not None or self._out_of_time():
                return ()
        return tuple(range(self._spec.nodes))

    def _can_grow(self) -> bool:
        """Whether what this generation lacks is here again, and it can be stopped without losing a step."""
        return (
            self._generation.world_size < self._spec.world_size
            and self._generation.world_size < self._spec.nodes * self._host.room(self._spec.gpus_per_node)
            and not self._generation.finished
            and self._host.ready()
            and all(beat.state is WorkerState.TRAINING for beat in self._beats())
        )

    def _notice(self, exits: list[Exit]) -> None:
        """Takes in what ended, and which ranks say that they are done."""
        generation, beats = self._generation, self._beats()
        for ended in exits:
            if ended.name == f"store{generation.number}":
                generation.add(self._lost("the rendezvous store ended"))
            for rank in list(generation.running):
                if ended.name == worker_name(generation.number, rank):
                    generation.running.discard(rank)
                    generation.judge(rank, beats[rank], ended if self._stopping is None else None)
        for rank, beat in enumerate(beats):
            if beat.state in _OVER and beat.generation == generation.number:
                generation.judge(rank, beat, None)
        self._recovery.look(beats, generation=generation.number, commits=self._commits, now=self._clock.monotonic())
        for slow in self._stragglers.look(beats):
            emit(self._run, "straggler", generation=generation.number, **vars(slow))
        hang = self._hangs.look(beats, generation.running) if not generation.failures else None
        if hang is not None:
            generation.add(hang)

    # ---- after a failure

    def _recover(self, failure: Failure) -> None:
        emit(
            self._run, "failure", generation=failure.generation, rank=failure.rank, step=failure.step,
            cause=failure.cause, message=failure.message,
        )  # fmt: skip
        kept = self._withdraw(failure)
        committed_step = self._commits.newest()
        decision = self._history.decide(failure, committed_step=committed_step, jitter=random.random() / 4)
        if decision.action == "stop":
            self._fail(failure, decision)
            return
        self._recovery.begin(failed_at=self._generation.first_failure_at, beats=self._beats())
        self._history.add(failure, committed_step=committed_step, in_process=bool(kept))
        self._report.restarting()
        number = self._generation.number + 1
        emit(
            self._run, "restarting", generation=number, rank=failure.rank, from_step=max(0, committed_step),
            attempt=self._report.status.restarts, backoff_seconds=decision.wait_seconds, kept=sorted(kept),
        )  # fmt: skip
        self._back_off(decision.wait_seconds)
        if self._stop_reason() is not None:
            self._answer_requests()
        elif not self._out_of_time():
            self._start_generation(number, cause=failure.message or failure.cause)

    def _withdraw(self, failure: Failure) -> set[int]:
        """Ends the failed generation; the ranks whose processes stay, parked."""
        generation = self._generation
        may = self._history.may_go_on(failure, committed_step=self._commits.newest())
        if not may or not generation.running:
            self._stop_workers()
            return set()
        withdrawal = self._crew.withdraw(failure, generation.running, self._clock.monotonic())
        while not withdrawal.done(self._beats(), generation.running, self._clock.monotonic()):
            if self._stop_reason() is not None or self._out_of_time():
                self._stop_workers()
                return set()
            self._notice(self._wait(_PARK_TURN_SECONDS))
        self._crew.keep(generation.number, generation.running)
        return set(generation.running)

    def _back_off(self, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        while self._clock.monotonic() < until and self._stop_reason() is None and not self._out_of_time():
            self._wait(min(_TURN_SECONDS, until - self._clock.monotonic()))

    def _fail(self, failure: Failure, decision: Decision) -> None:
        self._report.failed(failure, decision, len(self._history) + 1)
        self._end("FAILED", f"{failure.message or failure.cause} ({decision.reason})")

    def _lost(self, message: str, node: int | None = None) -> Failure:
        return Failure(
            kind="infrastructure", rank=None, node=node, generation=self._generation.number,
            step=min(beat.step for beat in self._beats()), cause=message, message=message,
            time=self._clock.wall(),
        )  # fmt: skip

    # ---- being asked to end

    def _answer_requests(self) -> None:
        if (reason := self._stop_reason()) is not None:
            self._ask_to_stop(reason)

    def _ask_to_stop(self, reason: str) -> None:
        generation, notice = self._generation, self._notice_of()
        self._stopping = stopping.ask(
            self._page, reason, world_size=generation.world_size, now=self._clock.monotonic(),
            step_seconds=self._hangs.step_seconds, preempt_seconds=grace_seconds(notice, self._preempt_seconds),
        )  # fmt: skip
        if reason == "preempt":
            emit(self._run, "preempted", generation=generation.number, signal=notice.cause if notice else "SIGTERM")

    def _finish_stopping(self, asked: Stopping) -> None:
        generation = self._generation
        reason = self._stop_reason() if asked.state is None else None
        if reason is not None:  # they are saving already
            self._stopping = asked = replace(asked, state=stopping.STATES[reason])
        if generation.running and not generation.failures and self._clock.monotonic() < asked.deadline:
            return
        if generation.all_finished and not generation.preempted:
            self._end("SUCCEEDED", "every rank returned a result before it could be stopped")
        elif asked.state is None:
            self._resize()
        else:
            self._end(asked.state, "it was asked to stop")

    def _resize(self) -> None:
        """All have saved and stopped; or one did not, and its failure is dealt with like others."""
        self._stopping = None
        stopping.ask_no_more(self._page)
        if not self._generation.failures:
            self._stop_workers()
            self._start_generation(self._generation.number + 1, cause="what was lost is back")

    def _end(self, state: State, message: str) -> None:
        self._stop_workers()
        self._page.close_ledgers()
        emit(self._run, "run_ended", generation=self._generation.number, state=state, message=message)
        self._report.ended(state)

    def _stop_workers(self) -> None:
        self._crew.stop()
        self._generation.running.clear()
