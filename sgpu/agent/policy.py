"""Restart or stop: a pure function of the failure, what came before, and the user's policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sgpu.agent.failure import Failure
from sgpu.contract.policies import RestartPolicy

_LONGEST_BACKOFF_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Past:
    """One earlier failure, and the newest committed step when it happened (-1: none)."""

    failure: Failure
    committed_step: int


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
    if failure.unrecoverable:
        return Decision(action="stop", reason=f"{failure.cause} would happen again")
    if policy.max_restarts == 0:
        return Decision(action="stop", reason="restarts are switched off")
    ours = failure.kind in ("exception", "exit") or (failure.kind == "signal" and "SIGKILL" not in failure.cause)
    if ours and failure.step == 0 and committed_step < 0 and not failure.collateral:
        return Decision(action="stop", reason="it failed before the first step was completed")
    since = [past for past in history if past.committed_step == committed_step]
    same = [past for past in since if past.failure.fingerprint == failure.fingerprint]
    at_this_step = [past for past in same if past.failure.step == failure.step]
    from_outside = not ours and failure.kind != "hang"  # two machines may well fail within one checkpoint's interval
    if len(at_this_step) >= (2 if from_outside else 1):
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
