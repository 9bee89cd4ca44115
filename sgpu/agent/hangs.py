"""Ranks that may hang: suspected, asked for their stacks, then blamed. Judged by watchdog.py and stacks.py."""

from __future__ import annotations

import signal
from collections.abc import Sequence, Set
from dataclasses import replace

from sgpu.agent import stacks, watchdog
from sgpu.agent.failure import Failure
from sgpu.agent.watchdog import Silence
from sgpu.agent.workers import WorkerHost, worker_name
from sgpu.contract.clock import Clock
from sgpu.contract.heartbeat import Beat, Section, WorkerState
from sgpu.contract.policies import RestartPolicy
from sgpu.contract.rundir import RunDir

_STACKS_SECONDS = 0.3  # ranks that can write their stacks have done so by then


class Hangs:
    """Looks at the ranks of one generation, turn by turn.

    Order of calls: `begin` per generation, then `look` each turn until it returns a failure.
    """

    def __init__(self, run: RunDir, host: WorkerHost, clock: Clock, policy: RestartPolicy) -> None:
        self._run, self._host, self._clock = run, host, clock
        self._hang_seconds, self._start_seconds = policy.hang_seconds, policy.start_seconds
        self.begin(0)

    def begin(self, generation: int) -> None:
        self._generation = generation
        self._stopped_since: dict[int, float] = {}
        self._blame_at: float | None = None

    def look(self, beats: Sequence[Beat], running: Set[int]) -> Failure | None:
        """The hang of the rank at fault, once its limit is over and the stacks are written."""
        now = self._clock.monotonic()
        beats = [self._of_this_generation(beat) for beat in beats]
        silence = watchdog.silent(
            beats, hang_seconds=self._hang_seconds, start_seconds=self._start_seconds, now_ns=int(now * 1e9)
        )
        silence = silence or self._stopped(beats, running, now)
        if silence is None:
            self._blame_at = None
        elif self._blame_at is None:
            self._ask_for_stacks(beats, running)
            self._blame_at = now + _STACKS_SECONDS
        elif now >= self._blame_at:
            return self._failure(silence)
        return None

    def _of_this_generation(self, beat: Beat) -> Beat:
        """What an earlier generation left in a slot says nothing about the process that is about to take it."""
        return beat if beat.generation == self._generation else replace(beat, state=WorkerState.ABSENT)

    def _stopped(self, beats: Sequence[Beat], running: Set[int], now: float) -> Silence | None:
        """A stopped process (SIGSTOP) is no progress in any section, also where no loop has begun."""
        for rank in sorted(running):
            if not self._host.stopped(worker_name(self._generation, rank)):
                self._stopped_since.pop(rank, None)
                continue
            seconds = now - self._stopped_since.setdefault(rank, now)
            if seconds > self._hang_seconds:
                beat = beats[rank]
                return Silence(
                    rank=rank, step=beat.step, section=beat.section, limit_seconds=self._hang_seconds,
                    silent_seconds=seconds, stopped=True,
                )  # fmt: skip
        return None

    def _ask_for_stacks(self, beats: Sequence[Beat], running: Set[int]) -> None:
        for rank in sorted(running):
            if beats[rank].state is not WorkerState.ABSENT:
                self._host.signal(worker_name(self._generation, rank), signal.SIGUSR2)

    def _failure(self, silence: Silence) -> Failure:
        written = {rank: self._stack(rank) for rank in silence.alike or (silence.rank,)}
        rank = stacks.to_blame(written)
        section, limit = silence.section.name.lower(), silence.limit_seconds
        told = "it wrote no stack: it is stopped, or stuck in the kernel"
        if written[rank].strip():
            told = f"stacks: {self._run.stacks(self._generation, rank)}"
        did = f"completed no step for {silence.silent_seconds:.1f} s (limit {limit:g} s) in section '{section}'"
        cause, since = f"no step for {limit:g} s", f"after step {silence.step}"
        if silence.section is Section.INIT and not silence.stopped:
            did = f"had not begun its loop {silence.silent_seconds:.1f} s (limit {limit:g} s) after its start"
            cause, since = f"no loop for {limit:g} s", "while it was setting up"
        return Failure(
            kind="hang", rank=rank, generation=self._generation, step=silence.step, cause=cause,
            message=f"rank {rank} {did} {since}; {told}",
            time=self._clock.wall(), traceback=written[rank].strip() or None,
        )  # fmt: skip

    def _stack(self, rank: int) -> str:
        try:
            return self._run.stacks(self._generation, rank).read_text(errors="replace")
        except FileNotFoundError:
            return ""
