"""A failed generation whose processes may be used again: its ranks give up their calls and park, or are ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sgpu.agent.judging.failure import Failure
from sgpu.agent.workers import WorkerHost, worker_name
from sgpu.contract.heartbeat import Beat, WorkerState

# A thread of its own takes the word within milliseconds; not where the call holds the interpreter's lock.
_HEAR_SECONDS = 1.0
# A call is left within a turn of its interpreter; a GPU's kernels or the kernel's disk may hold it a little longer.
_LEAVE_SECONDS = 5.0
# Then the newest save is handed over, and the memory that it held is given back.
_CLEAR_SECONDS = 15.0
_END_SECONDS = 5.0


class Withdrawal:
    """Order of calls: made when a generation has failed; then each turn `done`, until it is; then `parked`.

    Args:
        failure: of the generation; where its rank is `unheard`, that is not asked again, but ended.
        running: ranks whose processes live.
        now: monotonic.
    """

    def __init__(self, host: WorkerHost, failure: Failure, running: Iterable[int], now: float) -> None:
        self._host, self._generation, self._began = host, failure.generation, now
        self._unheard = failure.rank if failure.unheard else None
        host.interrupt([worker_name(self._generation, rank) for rank in sorted(running)], self._generation)
        host.end([f"store{self._generation}"], _END_SECONDS)  # who waits in it for others is free by that

    def done(self, beats: Sequence[Beat], running: set[int], now: float) -> bool:
        """Whether all that run are parked; those that take too long are ended, and leave `running`."""
        waited = now - self._began
        late = {
            rank
            for rank in running - self.parked(beats, running)
            if waited > self._limit(beats[rank])
            or rank == self._unheard
            or self._host.stopped(worker_name(self._generation, rank))
        }
        if late:
            self._host.end([worker_name(self._generation, rank) for rank in sorted(late)], _END_SECONDS)
            running -= late
        return self.parked(beats, running) == running

    def _limit(self, beat: Beat) -> float:
        if self._is(beat, WorkerState.FAILED):
            return _CLEAR_SECONDS
        listens = self._is(beat, WorkerState.STARTING) or self._is(beat, WorkerState.TRAINING)
        return _HEAR_SECONDS if listens and beat.heard != self._generation else _LEAVE_SECONDS

    def parked(self, beats: Sequence[Beat], running: Iterable[int]) -> set[int]:
        return {rank for rank in running if self._is(beats[rank], WorkerState.PARKED)}

    def _is(self, beat: Beat, state: WorkerState) -> bool:
        return beat.generation == self._generation and beat.state is state
