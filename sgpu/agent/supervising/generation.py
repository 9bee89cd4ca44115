"""One start of all workers: who runs, who is done, and what went wrong first."""

from __future__ import annotations

from sgpu.agent.judging.failure import Failure, from_exit, from_outcome, root_cause
from sgpu.agent.workers import Exit
from sgpu.contract.clock import Clock
from sgpu.contract.heartbeat import Beat
from sgpu.contract.outcome import read_outcome
from sgpu.contract.rundir import RunDir

_COLLATERAL_WAIT_SECONDS = 0.25  # the rank that caused a lost connection is seen this much later at most
_LINGER_SECONDS = 5.0  # a rank that wrote its result gets so long to leave


class Generation:
    """What is known of the workers of generation `number`.

    Attributes:
        running: ranks whose processes live.
        finished: ranks that left a result, or stopped where they were asked to, and when that was seen (monotonic).
        preempted: those of them that stopped.
        failures: in the order in which they were seen.
    """

    def __init__(self, run: RunDir, number: int, world_size: int, clock: Clock) -> None:
        self._run, self._clock = run, clock
        self.number, self.world_size = number, world_size
        self.running: set[int] = set()
        self.finished: dict[int, float] = {}
        self.preempted: set[int] = set()
        self.failures: list[Failure] = []
        self.first_failure_at = 0.0

    def judge(self, rank: int, beat: Beat, ended: Exit | None) -> None:
        """Takes in how a rank ended.

        Args:
            beat: what it said last.
            ended: None: the rank says that it is done, and its process may live on.
        """
        if rank in self.finished or any(failure.rank == rank for failure in self.failures):
            return
        outcome = read_outcome(self._run, self.number, rank)
        if outcome is not None and outcome.kind in ("result", "preempted"):
            self.finished[rank] = self._clock.monotonic()
            if outcome.kind == "preempted":
                self.preempted.add(rank)
        elif outcome is not None:
            self.add(from_outcome(outcome))
        elif ended is not None:
            step = beat.step if beat.generation == self.number else 0  # it may have ended before its first word
            self.add(from_exit(
                ended.status, rank=rank, generation=self.number, step=step, time=self._clock.wall(),
                out_of_memory=ended.out_of_memory,
            ))  # fmt: skip

    def add(self, failure: Failure) -> None:
        if not self.failures:
            self.first_failure_at = self._clock.monotonic()
        self.failures.append(failure)

    @property
    def settled(self) -> bool:
        """Whether the root cause is known: something that is no mere effect, or nothing else came in time."""
        if not self.failures or any(not _may_follow(failure) for failure in self.failures):
            return bool(self.failures)
        return self._clock.monotonic() - self.first_failure_at > _COLLATERAL_WAIT_SECONDS

    @property
    def root_cause(self) -> Failure:
        return root_cause(self.failures)

    @property
    def all_finished(self) -> bool:
        return len(self.finished) == self.world_size

    @property
    def gone_or_lingering(self) -> bool:
        """Whether nobody has to be waited for any more, once all are finished."""
        return not self.running or self._clock.monotonic() - max(self.finished.values()) > _LINGER_SECONDS


def _may_follow(failure: Failure) -> bool:
    """Whether something else may be the cause: a scheduler that wants the node back may signal workers too."""
    return failure.collateral or (failure.kind == "signal" and failure.cause.startswith(("SIGTERM", "SIGUSR1")))
