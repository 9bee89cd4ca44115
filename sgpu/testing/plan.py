"""Faults on purpose: what happens, to which rank, in which step or at which named point."""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from sgpu.contract.errors import InputError

FaultKind = Literal[
    "kill", "stop", "exit", "raise", "hang", "busy", "held GIL", "slow", "disk full", "I/O error", "corrupt"
]
STEP = "training.step"
POINTS = (
    "run.submit", "worker.boot", "worker.reboot", STEP, "training.epoch", "worker.result", "data.copy", "data.publish",
    "checkpoint.stage", "checkpoint.staged", "checkpoint.handed", "checkpoint.write", "checkpoint.shard_half",
    "checkpoint.shard_written", "checkpoint.done", "checkpoint.manifest", "checkpoint.metadata",
    "checkpoint.before_prune", "checkpoint.prune", "checkpoint.restore", "checkpoint.copy_half",
    "checkpoint.copy_arrived", "metrics.flush", "metrics.batch_written",
)  # fmt: skip

# Who passes them does not know which step of the training it is, or which rank.
_WITHOUT_STEP = frozenset({
    "run.submit", "worker.boot", "worker.reboot", "training.epoch", "worker.result", "data.copy", "data.publish",
    "checkpoint.shard_half", "checkpoint.before_prune", "checkpoint.prune", "checkpoint.restore",
    "checkpoint.copy_half", "checkpoint.copy_arrived", "metrics.flush", "metrics.batch_written",
})  # fmt: skip
_WITHOUT_RANK = frozenset({
    "run.submit", "training.epoch", "data.copy", "data.publish", "checkpoint.before_prune", "checkpoint.prune",
    "metrics.batch_written",
})  # fmt: skip

# As a fail-point has it, and where it happens unless the user says so.
_ACTIONS: Mapping[str, tuple[str, str]] = MappingProxyType({
    "kill": ("kill", STEP), "stop": ("stop", STEP), "exit": ("exit:{code}", STEP), "raise": ("raise:{error}", STEP),
    "hang": ("hang", STEP), "busy": ("spin", STEP), "held GIL": ("hold", STEP), "slow": ("sleep:{seconds}", STEP),
    "disk full": ("errno:ENOSPC", "checkpoint.write"), "I/O error": ("errno:EIO", "checkpoint.write"),
    "corrupt": ("flip", "checkpoint.shard_written"),
})  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One fault of a plan.

    Attributes:
        kind: "kill" (SIGKILL), "stop" (SIGSTOP), "exit" (os._exit with `code`), "raise" (`error`), "hang" (waits for
            ever), "busy" (computes for ever), "held GIL" (waits for ever, and no other thread runs), "slow" (waits
            `seconds`), "disk full" and "I/O error" (writing the checkpoint fails), "corrupt" (a bit of the checkpoint
            is flipped on its disk after it was written).
        rank: whom it strikes; None: whoever comes first.
        step: of the training, counted from 1: the one that is being computed, or, for what strikes checkpoints, the one
            whose checkpoint is written. None: the first that comes.
        at: a named point instead of the usual one, as "checkpoint.restore"; see docs/guides/drills.md.
        every_time: whenever the place is passed, also after a restart; otherwise once in the whole run.
        seconds: that "slow" waits.
        code: of "exit".
        error: a built-in exception that "raise" raises.

    Raises:
        InputError: an argument that cannot be.
    """

    kind: FaultKind
    rank: int | None = None
    step: int | None = None
    at: str | None = None
    every_time: bool = False
    seconds: float = 1.0
    code: int = 1
    error: str = "RuntimeError"

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise InputError(f"Fault: expected one of {list(get_args(FaultKind))}; found {self.kind!r}")
        for name, least in (("rank", 0), ("step", 1), ("code", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise InputError(f"Fault({name}=...): expected a whole number, {least} or more; found {value!r}")
        if isinstance(self.seconds, bool) or not isinstance(self.seconds, (int, float)) or not self.seconds >= 0:
            raise InputError(f"Fault(seconds=...): expected seconds, 0 or more; found {self.seconds!r}")
        if self.at is not None and self.at not in POINTS:
            raise InputError(f"Fault(at=...): expected the name of a point, one of {list(POINTS)}; found {self.at!r}")
        for name, unknown in (("step", _WITHOUT_STEP), ("rank", _WITHOUT_RANK)):
            if getattr(self, name) is not None and self.at in unknown:
                raise InputError(
                    f"Fault({name}=..., at={self.at!r}): who passes that point knows no {name}, so that it would never "
                    f"strike; leave {name} out"
                )
        found = getattr(builtins, self.error, None) if isinstance(self.error, str) else None
        if not isinstance(found, type) or not issubclass(found, BaseException):
            raise InputError(
                f'Fault(error=...): expected the name of a built-in exception, as "ValueError"; found {self.error!r}'
            )

    @property
    def point(self) -> str:
        """Where it strikes."""
        return self.at or _ACTIONS[self.kind][1]

    @property
    def setting(self) -> str:
        """As SGPU_FAILPOINT takes it."""
        action = _ACTIONS[self.kind][0].format(code=self.code, error=self.error, seconds=f"{self.seconds:.6f}")
        rank = "" if self.rank is None else f"@{self.rank}"
        step = "" if self.step is None else f"%{self.step}"
        return f"{self.point}{rank}{step}{'' if self.every_time else '!'}={action}"

    def __str__(self) -> str:
        who = "whichever rank comes first" if self.rank is None else f"rank {self.rank}"
        where = f"in step {self.step}" if self.step is not None else ""
        place = f"at {self.point}" if self.at is not None else ""
        return " ".join(filter(None, (f"{self.kind}: {who}", where, place, "every time" if self.every_time else "")))


class FaultPlan:
    """Faults that a drill meets: `FaultPlan(Fault("kill", rank=1, step=7), Fault("disk full", step=20))`.

    Raises:
        InputError: nothing is planned, or something that is no `Fault`.
    """

    def __init__(self, *faults: Fault) -> None:
        if not faults or not all(isinstance(fault, Fault) for fault in faults):
            raise InputError(f'FaultPlan: expected faults, as Fault("kill", rank=1, step=7); found {faults!r}')
        self.faults = faults

    @property
    def setting(self) -> str:
        """As SGPU_FAILPOINT takes it."""
        return "; ".join(fault.setting for fault in self.faults)

    def __repr__(self) -> str:
        return f"FaultPlan({', '.join(map(repr, self.faults))})"
