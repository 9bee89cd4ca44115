"""From what was seen (an exit status, an outcome, silence) to one Failure; and which of several came first."""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sgpu.contract.outcome import Outcome

Kind = Literal["exception", "exit", "signal", "hang", "infrastructure", "timeout"]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a generation ended.

    Attributes:
        rank: the rank at fault; None: no rank is (the store, the zygote or a node was lost).
        node: the node at fault, where a whole one is.
        cause: a few words: "ValueError", "exit code 3", "SIGKILL", "no step for 600 s".
        collateral: probably the effect of another rank's end.
        unrecoverable: it would happen again, whatever is restarted.
        unheard: the rank's process has not answered the agent, which has waited long enough for it.
        time: seconds since 1970.
    """

    kind: Kind
    rank: int | None
    generation: int
    step: int
    cause: str
    message: str
    time: float
    traceback: str | None = None
    collateral: bool = False
    unrecoverable: bool = False
    node: int | None = None
    unheard: bool = False

    @property
    def fingerprint(self) -> str:
        """The same for failures that are the same: kind, cause and the message without its numbers and addresses.

        Of a hang, the rank alone: what it was seen to do differs from one time to the next, as does a learned limit.
        """
        if self.kind == "hang":
            return f"hang/{self.rank}"
        shape = re.sub(r"0x[0-9a-f]+|\d+", "#", self.message)
        return hashlib.sha256(f"{self.kind}/{self.cause}/{shape}".encode()).hexdigest()[:16]


def from_outcome(outcome: Outcome) -> Failure:
    if outcome.kind == "exit":
        cause = f"{outcome.exception_type}: {outcome.message}" if outcome.message else str(outcome.exception_type)
        message = f"rank {outcome.rank} ended without a result ({cause})"
        return Failure(
            kind="exit", rank=outcome.rank, generation=outcome.generation, step=outcome.step, cause=cause,
            message=message, time=outcome.time, traceback=outcome.traceback,
        )  # fmt: skip
    return Failure(
        kind="exception",
        rank=outcome.rank,
        generation=outcome.generation,
        step=outcome.step,
        cause=str(outcome.exception_type),
        message=outcome.message or "",
        time=outcome.time,
        traceback=outcome.traceback,
        collateral=outcome.collateral,
        unrecoverable=outcome.unrecoverable,
    )


def from_exit(
    status: int, *, rank: int, generation: int, step: int, time: float, out_of_memory: bool = False
) -> Failure:
    """A worker that left no outcome.

    Args:
        status: as os.waitpid gives it.
        out_of_memory: the kernel killed it for want of memory.
    """
    kind: Kind
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        kind, cause = "signal", f"{name}, signal {number}"
        if out_of_memory:
            cause = f"out of memory: {cause} by the kernel"
    else:
        kind, cause = "exit", f"exit code {os.WEXITSTATUS(status)}"
    return Failure(
        kind=kind, rank=rank, generation=generation, step=step, cause=cause, time=time,
        message=f"rank {rank} ended without a result ({cause})",
    )  # fmt: skip


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The one that the others followed from: not collateral before collateral, then the earliest."""
    return min(failures, key=lambda failure: (failure.collateral, failure.time))
