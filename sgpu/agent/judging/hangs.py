"""Ranks that may hang: suspected, asked for their stacks, then blamed. Judged by watchdog.py and stacks.py."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Sequence, Set
from dataclasses import replace

from sgpu.agent.judging import kernel_view, stacks, watchdog
from sgpu.agent.judging.failure import Failure
from sgpu.agent.judging.kernel_view import KernelView
from sgpu.agent.judging.limits import Learner, name_of
from sgpu.agent.judging.stacks import Evidence
from sgpu.agent.judging.watchdog import Silence
from sgpu.agent.workers import WorkerHost, worker_name
from sgpu.contract.beat import Beat, Section, WorkerState
from sgpu.contract.clock import Clock
from sgpu.contract.policies import RestartPolicy
from sgpu.contract.rundir import RunDir

_STACKS_SECONDS = 0.3  # ranks that can write their stacks have done so by then
_FROZEN_SECONDS = 1.0  # a turn that takes so long, and half a limit: all of this machine's processes stood still
_LOOK_SECONDS = 0.15  # from one look to the next; by then a busy rank has used its core
_HEAR_SECONDS = 5.0  # whether a rank can take the agent's word is known by then, however overloaded the machine is


class Hangs:
    """Looks at the ranks of one generation, turn by turn.

    Order of calls: `begin` per generation, then `look` each turn until it returns a failure.
    """

    def __init__(self, run: RunDir, host: WorkerHost, clock: Clock, policy: RestartPolicy) -> None:
        self._run, self._host, self._clock = run, host, clock
        self._learner = Learner(run, policy)
        self.begin(0)

    def begin(self, generation: int) -> None:
        self._generation = generation
        self._stopped_since: dict[int, float] = {}
        self._excused_until = 0.0
        self._looked_at = self._thawed_at = self._clock.monotonic()
        self._forget()

    @property
    def step_seconds(self) -> float:
        """What a step of this run takes on the average; 0: there was none."""
        return self._learner.times.mean_seconds

    def look(self, beats: Sequence[Beat], running: Set[int]) -> Failure | None:
        """The hang of the rank at fault, once its limit is over and the stacks are written."""
        now = self._clock.monotonic()
        beats = [self._of_this_generation(beat) for beat in beats]
        limits = self._learner.observe(beats, now)
        self._notice_freeze(now, limits.step_seconds)
        silence = watchdog.silent(
            beats, limits=limits, now_ns=int(now * 1e9), excused_ns=int(self._excused_until * 1e9),
            thawed_ns=int(self._thawed_at * 1e9),
        )  # fmt: skip
        silence = silence or self._stopped(beats, running, now, limits.step_seconds)
        if silence is None or (self._waiting and silence.waits_for is None):
            if self._waiting:
                self._excused_until = now  # what they waited for is over: from here on their silence is their own
            self._forget()
        elif self._asked_at is None or (self._waiting and set(silence.suspects) - self._waiting):
            self._ask_for_stacks(beats, running, now)
        elif not self._waiting:
            return self._judge(silence, beats, running, now)
        return None

    def _notice_freeze(self, now: float, limit: float) -> None:
        """Where this process itself stood still (a paused container, a machine put to sleep), so did the ranks."""
        if now - self._looked_at > max(_FROZEN_SECONDS, limit / 2):
            self._thawed_at = now
            self._stopped_since.clear()
            self._forget()
        self._looked_at = now

    def _forget(self) -> None:
        self._asked_at: float | None = None
        self._examined_at, self._looks = 0.0, 0
        self._waiting: set[int] = set()
        self._answers: dict[int, int] = {}
        self._written: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._sizes: dict[int, int] = {}

    def _of_this_generation(self, beat: Beat) -> Beat:
        """What an earlier generation left in a slot says nothing about the process that is about to take it."""
        return beat if beat.generation == self._generation else replace(beat, state=WorkerState.ABSENT)

    def _stopped(self, beats: Sequence[Beat], running: Set[int], now: float, limit: float) -> Silence | None:
        """A stopped process (SIGSTOP) is no progress in any section, also where no loop has begun."""
        for rank in sorted(running):
            if not self._host.stopped(worker_name(self._generation, rank)):
                self._stopped_since.pop(rank, None)
                continue
            seconds = now - self._stopped_since.setdefault(rank, now)
            if seconds > limit:
                beat = beats[rank]
                return Silence(
                    rank=rank, step=beat.step, section=beat.section, name=name_of(beat), limit_seconds=limit,
                    silent_seconds=seconds, suspects=(rank,),
                )  # fmt: skip
        return None

    def _ask_for_stacks(self, beats: Sequence[Beat], running: Set[int], now: float) -> None:
        """Of all ranks; asks whether they hear, and has it looked up how the kernel sees them."""
        self._forget()
        self._asked_at = now
        for rank in sorted(running):
            if beats[rank].state is WorkerState.ABSENT:  # it could not take the signal yet
                continue
            self._answers[rank] = beats[rank].answers
            self._written[rank] = len(_text(self._run.stacks(self._generation, rank)))
            self._seen[rank] = len(_text(self._run.process(self._generation, rank)))
            self._host.signal(worker_name(self._generation, rank), signal.SIGUSR2)
        self._examine(now)

    def _examine(self, now: float) -> None:
        self._examined_at, self._looks = now, self._looks + 1
        for rank in self._written:
            self._host.examine(worker_name(self._generation, rank), self._run.process(self._generation, rank))

    def _judge(self, silence: Silence, beats: Sequence[Beat], running: Set[int], now: float) -> Failure | None:
        asked_at = self._asked_at if self._asked_at is not None else now
        waited = now - asked_at
        if now - self._examined_at >= _LOOK_SECONDS:
            self._examine(now)
        if waited < _STACKS_SECONDS and not (self._looks > 1 and self._all_written()):
            return None
        evidence = {rank: self._evidence(rank, beats[rank]) for rank in sorted(running)}
        suspects = [one for one in silence.suspects if one in evidence]
        culprit = stacks.to_blame(suspects, evidence)
        doubtful = suspects if culprit is None else [culprit]
        if waited < _HEAR_SECONDS and any(evidence[one].undecided for one in doubtful):
            return None
        if culprit is None and silence.waits_for is not None:
            self._waiting = set(silence.suspects)
            return None
        self._learner.gone_over(silence.step, now)
        return self._failure(silence, culprit, Evidence() if culprit is None else evidence[culprit], beats)

    def _all_written(self) -> bool:
        """Whether each has written its stack, if it can, and nothing more since the last turn."""
        sizes = {rank: len(_text(self._run.stacks(self._generation, rank))) for rank in self._written}
        before, self._sizes = self._sizes, sizes
        return sizes == before and all(
            sizes[rank] > since or self._host.stopped(worker_name(self._generation, rank))
            for rank, since in self._written.items()
        )

    def _evidence(self, rank: int, beat: Beat) -> Evidence:
        kernel = kernel_view.parse(_text(self._run.process(self._generation, rank))[self._seen.get(rank, 0) :])
        if self._host.stopped(worker_name(self._generation, rank)):
            kernel = replace(kernel, state="T") if kernel is not None else KernelView(state="T")
        stack = _text(self._run.stacks(self._generation, rank))[self._written.get(rank, 0) :]
        answered = beat.answers != self._answers.get(rank, -1)
        return Evidence(stack=stack.strip(), kernel=kernel, begun=rank in self._written, answered=answered)

    def _failure(self, silence: Silence, rank: int | None, evidence: Evidence, beats: Sequence[Beat]) -> Failure:
        limit, over = silence.limit_seconds, f"for {silence.silent_seconds:.1f} s (limit {silence.limit_seconds:g} s)"
        cause, step, traceback = f"no step for {limit:g} s", silence.step, evidence.stack or None
        if rank is None:
            stood = ", ".join(f"rank {at} in '{name_of(beat)}' after step {beat.step}" for at, beat in enumerate(beats))
            message = (
                f"no rank completed a step {over}, and each waits for the others, so that none is to blame ({stood}): "
                "their collectives do not match, or the network between them is at fault; "
                f"stacks: {self._run.attempts / str(self._generation)}/rank*/stacks"
            )
        else:
            beat, step = beats[rank], beats[rank].step
            did = f"completed no step {over} in section '{name_of(beat)}' after step {step}"
            if beat.section is Section.INIT and not evidence.stopped:
                did, cause = f"had not begun its loop {over[4:]} after its start", f"no loop for {limit:g} s"
            path = self._run.process if evidence.frozen else self._run.stacks
            did = f"{stacks.lock_held(evidence)}, and {did}" if evidence.holds_lock else did
            message = f"rank {rank} {did}; {stacks.deed(evidence)}; see {path(self._generation, rank)}"
        return Failure(
            kind="hang", rank=rank, generation=self._generation, step=step, cause=cause, message=message,
            time=self._clock.wall(), traceback=traceback, unheard=evidence.unheard,
        )  # fmt: skip


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
