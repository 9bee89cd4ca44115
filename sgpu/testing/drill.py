"""A run that is struck on purpose, and what that cost."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sgpu.contract.errors import InputError
from sgpu.run import Run
from sgpu.testing.plan import Fault, FaultPlan


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What followed one failure.

    Attributes:
        told: the failure as the run named it.
        rank: the rank that the run blamed; None: none.
        step: completed by then.
        seconds: from the failure to the next trained step of all ranks; None: there was none.
        steps_again: that were done twice.
    """

    told: str
    rank: int | None
    step: int
    seconds: float | None = None
    steps_again: int = 0


@dataclass(frozen=True, kw_only=True)
class DrillReport:
    """What a drill showed. `print(report)` tells it.

    Attributes:
        run: the run itself, with its folder, logs and events.
        state: how it ended.
        error: what `run.result()` raises; None: it succeeded.
        fired: the faults that happened, in the plan's order.
        missed: those that did not: the run never came there.
        recoveries: in order.
        warnings: that the run told besides.
        goodput: the share of all ranks' seconds in which training went forward.
    """

    run: Run
    state: str
    error: str | None
    fired: tuple[Fault, ...]
    missed: tuple[Fault, ...]
    recoveries: tuple[Recovery, ...]
    warnings: tuple[str, ...]
    goodput: float

    @property
    def lost_seconds(self) -> float:
        """From each failure to the next trained step, together."""
        return sum(each.seconds or 0.0 for each in self.recoveries)

    @property
    def lost_steps(self) -> int:
        """Steps that were done twice."""
        return sum(each.steps_again for each in self.recoveries)

    def __str__(self) -> str:
        lines = [f"drill of run {self.run.id}: {self.state}, goodput {self.goodput:.1%}"]
        lines += [f"  fired: {fault}" for fault in self.fired]
        lines += [f"  did not fire: {fault}" for fault in self.missed]
        for each in self.recoveries:
            after = "not survived" if each.seconds is None else f"{each.seconds:.2f} s, {each.steps_again} steps again"
            lines.append(f"  after step {each.step}: {each.told}: {after}")
        lines += [f"  warning: {text}" for text in self.warnings]
        lines.append(f"  lost: {self.lost_seconds:.2f} s and {self.lost_steps} steps")
        return "\n".join(lines if self.error is None else [*lines, f"  error: {self.error}"])


def fire(train: Any, plan: FaultPlan, args: Sequence[Any], kwargs: dict[str, Any]) -> DrillReport:
    """Submits a decorated function with the faults armed, and waits for its end.

    Args:
        train: a `DistributedFunction`.
        args, kwargs: of the call.

    Raises:
        InputError: no plan, or one that strikes a rank that there is not.
    """
    if not isinstance(plan, FaultPlan):
        raise InputError(f"drill(plan, ...): expected a FaultPlan before the call's own arguments; found {plan!r}")
    world = train.plan(*args, **kwargs).spec.world_size
    for fault in plan.faults:
        if fault.rank is not None and fault.rank >= world:
            raise InputError(f"{fault}: the run has ranks 0 to {world - 1}")
    with tempfile.TemporaryDirectory(prefix="sgpu-drill-") as folder:
        log = pathlib.Path(folder) / "fired"
        armed = train.with_env({"SGPU_FAILPOINT": plan.setting, "SGPU_FAILPOINT_LOG": str(log)})
        run = armed.submit(*args, **kwargs)
        try:
            state = run.wait()
        except BaseException:  # an interrupt: no run is left behind a cell that ended
            run.cancel()
            raise
        lines = log.read_text().splitlines() if log.exists() else []
        fired = [fault for number, fault in enumerate(plan.faults) if _happened(fault, number, log, lines)]
    return DrillReport(
        run=run, state=state, error=_error(run, state), fired=tuple(fired),
        missed=tuple(fault for fault in plan.faults if fault not in fired), recoveries=tuple(recoveries(run.events())),
        warnings=tuple(str(event["message"]) for event in run.events() if event["kind"] == "warning"),
        goodput=run.goodput().goodput,
    )  # fmt: skip


def recoveries(events: Sequence[dict[str, Any]]) -> Iterator[Recovery]:
    """Each failure that a run's events tell, with what followed it."""
    waiting: list[Recovery] = []
    for event in events:
        if event["kind"] == "failure":
            told = str(event["message"] or event["cause"])
            waiting.append(Recovery(told=told, rank=event["rank"], step=event["step"]))
        elif event["kind"] == "resumed" and waiting:
            yield from waiting[:-1]  # it failed again before it trained: the last one is told what all of them cost
            yield replace(waiting[-1], seconds=event["seconds"], steps_again=event["recomputed_steps"])
            waiting.clear()
    yield from waiting


def _happened(fault: Fault, number: int, log: pathlib.Path, lines: Sequence[str]) -> bool:
    if not fault.every_time:
        return log.with_name(f"{log.name}.{number}").exists()
    rank = "" if fault.rank is None else f"rank={fault.rank} "
    return any(line.startswith(f"{fault.point} {rank}") for line in lines)


def _error(run: Run, state: str) -> str | None:
    if state == "SUCCEEDED":
        return None
    try:
        run.result(0)
    except BaseException as error:  # noqa: BLE001 - a rank's own, which may be anything: it is what is reported
        return f"{type(error).__name__}: {error}"
    return None
