"""Restart or stop: a pure function of the failure, what came before, and the user's policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sgpu.agent.judging.failure import Failure
from sgpu.contract.policies import RestartPolicy

_LONGEST_BACKOFF_SECONDS = 60.0
_MOST_IN_PROCESS = 2  # without a new checkpoint: then what they carry along is to be suspected


@dataclass(frozen=True, kw_only=True)
class Past:
    """One earlier failure, and the newest committed step when it happened (-1: none).

    Attributes:
        in_process: some worker went on in its process after it.
    """

    failure: Failure
    committed_step: int
    in_process: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do.

    Attributes:
        error: the name of the error that a stop raises in the notebook.
        wait_seconds: before the restart.
        reason: one sentence, for people.
    """

    action: Literal["restart", "stop"]
    reason: str
    wait_seconds: float = 0.0
    error: Literal["failure", "crash_loop"] = "failure"


def decide(
    failure: Failure,
    history: Sequence[Past],
    policy: RestartPolicy,
    *,
    committed_step: int,
    jitter: float = 0.0,
) -> Decision:
    """What follows a failure.

    Args:
        failure: the root cause.
        history: earlier failures of this run, oldest first.
        policy: the user's.
        committed_step: the newest step with a committed checkpoint, -1 where there is none.
        jitter: 0 to 1; spreads the waits of many runs.
    """
    if _before_its_first_step(failure, history):
        return Decision(action="restart", reason="its process was used again, and a fresh one may get further")
    if failure.unrecoverable:
        return Decision(action="stop", reason=f"{failure.cause} would happen again")
    if policy.max_restarts == 0:
        return Decision(action="stop", reason="restarts are switched off")
    ours = _is_ours(failure)
    if ours and failure.step == 0 and committed_step < 0 and not failure.collateral:
        return Decision(action="stop", reason="it failed before the first step was completed")
    since = [past for past in history if past.committed_step == committed_step]
    alike = _alike(failure, history, committed_step)
    from_outside = not ours and failure.kind != "hang"  # two machines may well fail within one checkpoint's interval
    if len(alike) >= (2 if from_outside else 1) and not _only_in_kept(alike, history):
        return Decision(
            action="stop",
            error="crash_loop",
            reason=f"the same failure at the same step {failure.step}, and no new checkpoint in between",
        )
    if len(since) >= policy.max_restarts:
        return Decision(
            action="stop",
            error="crash_loop" if since else "failure",
            reason=f"{len(since)} restarts brought no new checkpoint (restarts={policy.max_restarts})",
        )
    wait = 0.0
    if since:
        wait = min(_LONGEST_BACKOFF_SECONDS, policy.backoff_seconds * 2 ** (len(since) - 1)) * (1 + jitter)
    return Decision(action="restart", reason=f"{failure.cause} can be survived", wait_seconds=wait)


def _before_its_first_step(failure: Failure, history: Sequence[Past]) -> bool:
    """Whether a process that was used again did not even get to its first step: what it had kept may be the reason."""
    return _ran_in_kept(len(history), history) and failure.step == 0 and _is_ours(failure)


def _alike(failure: Failure, history: Sequence[Past], committed_step: int) -> list[int]:
    """Which of the earlier ones were the same at the same step, without a new checkpoint in between."""
    what = (committed_step, failure.step, failure.fingerprint)
    each = enumerate(history)
    return [at for at, past in each if (past.committed_step, past.failure.step, past.failure.fingerprint) == what]


def _only_in_kept(alike: Sequence[int], history: Sequence[Past]) -> bool:
    """Whether a failure, which is `alike` to those, was never seen in processes that were all fresh."""
    return all(_ran_in_kept(at, history) for at in (*alike, len(history)))


def _ran_in_kept(attempt: int, history: Sequence[Past]) -> bool:
    """Whether some process of this attempt was used again; `len(history)`: of the present one."""
    return attempt > 0 and history[attempt - 1].in_process


def _is_ours(failure: Failure) -> bool:
    """Whether the code brought it about, and not the machine or a person."""
    return failure.kind in ("exception", "exit") or (failure.kind == "signal" and "SIGKILL" not in failure.cause)


class History:
    """The failures of a run, and what follows from one more."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._past: list[Past] = []

    def __len__(self) -> int:
        return len(self._past)

    def add(self, failure: Failure, *, committed_step: int, in_process: bool) -> None:
        """It was answered by a restart."""
        self._past.append(Past(failure=failure, committed_step=committed_step, in_process=in_process))

    def decide(self, failure: Failure, *, committed_step: int, jitter: float = 0.0) -> Decision:
        return decide(failure, self._past, self._policy, committed_step=committed_step, jitter=jitter)

    def may_go_on(self, failure: Failure, *, committed_step: int) -> bool:
        """Whether workers may go on in their processes, as far as it is known now."""
        without_progress = [past for past in self._past if past.in_process and past.committed_step == committed_step]
        if not self._policy.in_process or len(without_progress) >= _MOST_IN_PROCESS:
            return False
        alike = _alike(failure, self._past, committed_step)
        if _before_its_first_step(failure, self._past) or (alike and _only_in_kept(alike, self._past)):
            return False
        return self.decide(failure, committed_step=committed_step).action == "restart"
