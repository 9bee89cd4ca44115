"""Where a run stands. The agent alone writes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from sgpu.contract import atomic
from sgpu.contract.rundir import RunDir

State = Literal["STARTING", "RUNNING", "RESTARTING", "SUCCEEDED", "FAILED", "CANCELLED", "PREEMPTED", "LOST"]
FINAL_STATES: frozenset[str] = frozenset({"SUCCEEDED", "FAILED", "CANCELLED", "PREEMPTED", "LOST"})


@dataclass(frozen=True, kw_only=True)
class NodeStatus:
    """One node of a run that has several.

    Attributes:
        address: None while it is not there.
        state: "ready" to start workers at once, "here", or "away": being started (again).
    """

    node: int
    address: str | None
    state: Literal["ready", "here", "away"]


@dataclass(frozen=True, kw_only=True)
class Status:
    """A run's state at one moment.

    Attributes:
        updated: seconds since 1970.
        generation: 0 for the first start, one more for each restart.
        step: optimizer steps completed by the slowest rank.
        total_steps: None while unknown.
        failure: {"kind", "rank", "node", "step", "message", "traceback"} of the root cause, once there is one.
        world_size: of the present generation; None: as many workers as were asked for.
        nodes: in order; empty where the run is on one node.
    """

    state: State
    updated: float
    started: float | None = None
    ended: float | None = None
    generation: int = 0
    restarts: int = 0
    step: int = 0
    epoch: int = 0
    total_steps: int | None = None
    failure: dict[str, Any] | None = None
    world_size: int | None = None
    nodes: tuple[NodeStatus, ...] = ()

    @property
    def final(self) -> bool:
        return self.state in FINAL_STATES

    def write(self, run: RunDir) -> None:
        atomic.write_json(run.status, asdict(self), durable=self.final)


def read_status(run: RunDir) -> Status | None:
    value = atomic.read_json(run.status)
    if value is None:
        return None
    known = {f.name for f in fields(Status)}
    value = {key: item for key, item in value.items() if key in known}
    value["nodes"] = tuple(NodeStatus(**node) for node in value.get("nodes", ()))
    return Status(**value)
