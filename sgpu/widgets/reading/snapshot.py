"""What a run looks like at one moment: plain data, the only thing that the views know of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = Literal["detail", "info", "good", "warning", "error"]
MarkKind = Literal["checkpoint", "restart", "failure"]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric of one rank over steps, thinned.

    Attributes:
        steps: strictly increasing.
        values: one a step; None where the value was NaN or infinite.
        version: as long as it stays the same, `steps` and `values` only grow at their end.
        logged: values that were ever logged, before thinning.
        latest: the last value, in words.
        note: what a reader of the chart should know, or "".
    """

    name: str
    rank: int
    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    version: int
    logged: int
    latest: str
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something to show on the step axis."""

    kind: MarkKind
    step: int
    label: str


@dataclass(frozen=True, kw_only=True)
class Happening:
    """One event as a sentence. `number` counts from 0 in the order of the events file; `time` is seconds since 1970."""

    number: int
    time: float
    kind: str
    level: Level
    sentence: str


@dataclass(frozen=True, kw_only=True)
class LogTail:
    """The end of one rank's log.

    Attributes:
        lines: without line ends; the last one may still grow or be replaced.
        first_line: how many lines came before `lines[0]` since this log is followed.
        path: the whole log's file, of the newest generation.
    """

    rank: int
    generation: int
    path: str
    size_bytes: int
    first_line: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A node of a run that has several.

    Attributes:
        state: "ready", "here" or "away", as its status says; "" once the run has ended.
        ranks: in words; a spare has none.
        step: of its slowest rank; None while unknown.
    """

    node: int
    address: str
    state: str
    ranks: str
    step: int | None


@dataclass(frozen=True, kw_only=True)
class Usage:
    """One figure of a node over the time of the run, or of the process or the GPU of one of its ranks.

    Attributes:
        rank: None: of the node as a whole.
        figure: as in `sgpu.metrics.names`.
        label: what it is, in words.
        unit: "%", "bytes", "bytes/s", "W" or "°C".
        series: its `steps` are seconds since the run was created.
        now: the last value in words, with what there is in all where that is known.
        highest: in words.
    """

    node: int
    rank: int | None
    figure: str
    label: str
    unit: str
    series: Series
    now: str
    highest: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the time ledger; `share` is of all rank seconds."""

    name: str
    label: str
    seconds: float
    share: float


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the time of all ranks went. `share` is the productive part, 0 to 1."""

    share: float
    rank_seconds: float
    ranks: int
    parts: tuple[Part, ...]
    sentence: str
    advice: str = ""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The root cause.

    Attributes:
        summary: who failed, where and how, on one line.
        message: the whole message; may have several lines.
        tried: what was done against it, and why no more was.
        resume_step: of the newest committed checkpoint; None: there is none.
    """

    summary: str
    rank: int | None
    step: int | None
    message: str
    traceback: str
    tried: str
    resume_step: int | None


@dataclass(frozen=True, kw_only=True)
class TrackingLink:
    """Where MLflow shows the run: a page, or the command that opens one."""

    run_id: str
    url: str
    command: str


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that a view shows of a run.

    Attributes:
        state: as in `sgpu.contract.status`.
        final: nothing will change any more, and everything was read.
        behind: there is more to read than one refresh takes; the next snapshot goes on.
        elapsed_seconds: since the start, up to the end once there is one.
        step: optimizer steps completed by the slowest rank.
        total_steps: None while unknown.
        steps_per_second: of the last half minute; of the whole run once it is final; None while unknown.
        eta_seconds: time left at that rate; None while unknown.
        world_size: as many ranks as were asked for. `workers`: as many as work now, after nodes were lost.
        series: by name; rank 0's under their own names, those of others as `rank<k>/<name>`.
        earlier_happenings: how many events are in the file but no longer in `happenings`.
        machines: in order; empty where the run is on one node.
        usage: what nodes, processes and GPUs take, by node; a node's own figures before those of its ranks.
        logs: the failing rank first, then by rank.
        note: what is wrong with the view itself, or "".
    """

    id: str
    name: str
    folder: str
    state: str
    final: bool
    behind: bool
    elapsed_seconds: float
    started: float
    step: int
    epoch: int
    total_steps: int | None
    steps_per_second: float | None
    eta_seconds: float | None
    world_size: int
    workers: int
    accelerator: str
    nodes: int
    generation: int
    restarts: int
    goodput: Goodput | None
    series: Mapping[str, Series] = field(default_factory=dict)
    marks: tuple[Mark, ...] = ()
    happenings: tuple[Happening, ...] = ()
    earlier_happenings: int = 0
    machines: tuple[Machine, ...] = ()
    usage: tuple[Usage, ...] = ()
    logs: tuple[LogTail, ...] = ()
    failure: Failure | None = None
    tracking: TrackingLink | None = None
    note: str = ""
