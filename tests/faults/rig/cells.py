"""The fault matrix as plain data: what happens, when, and what the run has to come to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from sgpu import RestartPolicy

Where = Literal["notebook", "worker", "helper"]
States = tuple[str, ...]

_HANG_SECONDS = 3.0
_HELPER_HANG_SECONDS = 6.0  # a third of it is what the helper may take to answer
_GOES_ON: States = ("SUCCEEDED",)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What happens. `action`: as a failpoint has it. `disk`: it needs something to be written or read afterwards."""

    name: str
    action: str
    disk: bool = False
    hangs: bool = False


@dataclass(frozen=True, kw_only=True)
class Moment:
    """When it happens.

    Attributes:
        point: the failpoint, with rank and number.
        where: which process is there.
        place: what the files that are touched next have in their paths.
        before: what happens first, so that the moment comes.
        lost: `before` ends the run once, so that it has to be resumed.
        trained: whether a checkpoint is committed by then.
    """

    name: str
    point: str
    where: Where = "worker"
    place: str = "/checkpoints/"
    reading: bool = False
    before: str = ""
    lost: bool = False
    trained: bool = True


@dataclass(frozen=True, kw_only=True)
class End:
    """What a cell has to come to.

    Attributes:
        states: of the run, each time it ended; one of these.
        failures: how many the run's events tell.
        told: what one of the errors, failures or warnings says.
    """

    states: tuple[States, ...] = (_GOES_ON,)
    failures: tuple[int, ...] = (0,)
    told: str = ""


KINDS = {kind.name: kind for kind in (
    Kind(name="SIGKILL", action="kill"),
    Kind(name="exception", action="raise:RuntimeError"),
    Kind(name="exit 0", action="exit:0"),
    Kind(name="SIGTERM", action="signal:SIGTERM"),
    Kind(name="SIGINT", action="signal:SIGINT"),
    Kind(name="SIGSTOP", action="stop", hangs=True),
    Kind(name="held GIL", action="hold", hangs=True),
    Kind(name="disk full", action="disk_full", disk=True),
    Kind(name="I/O error once", action="io_once", disk=True),
    Kind(name="I/O error for good", action="io_for_good", disk=True),
    Kind(name="slow I/O", action="io_slow", disk=True),
    Kind(name="corrupt bytes", action="corrupt", disk=True),
    Kind(name="remote 5xx", action="remote", disk=True),
    Kind(name="clock jump", action="clock"),
    Kind(name="launcher killed", action="launcher"),
    Kind(name="several ranks killed", action="several"),
)}  # fmt: skip

MOMENTS = {moment.name: moment for moment in (
    Moment(name="submit", point="run.submit", where="notebook", place="/home/runs/", trained=False),
    Moment(name="boot", point="worker.boot@1", place="/home/runs/", trained=False),
    Moment(name="first batch", point="training.step@1%1", place="/home/runs/", trained=False),
    Moment(name="half a file fetched", point="data.copy@1#2", place="/home/cache/", trained=False),
    Moment(name="before all-reduce", point="job.before_all_reduce@1%6"),
    Moment(name="between backward and step", point="job.before_step@0%7"),
    Moment(name="staging", point="checkpoint.stage@1#2"),
    Moment(name="half a shard", point="checkpoint.shard_half#3", where="helper"),
    Moment(name="before commit", point="checkpoint.metadata#2", where="helper"),
    Moment(name="before prune", point="checkpoint.before_prune#1", where="helper"),
    Moment(name="pruning", point="checkpoint.prune#1", where="helper"),
    Moment(name="restore", point="checkpoint.restore@1", reading=True, before="training.step@0%6!=launcher", lost=True),
    Moment(name="during a restart", point="worker.reboot@1", place="/home/runs/", before="training.step@1%6!=kill"),
    Moment(name="epoch's edge", point="training.epoch@0#1", place="/home/runs/"),
    Moment(name="before the result", point="worker.result@1", place="/home/runs/"),
    Moment(name="flush of metrics", point="metrics.flush@1#3", place="/metrics/"),
)}  # fmt: skip


# Kinds and moments that make no sense together, and why.
_NO_SENSE: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("SIGSTOP", "held GIL"), ("submit",), "a notebook that stands still has started nothing that could be lost"),
    (("launcher killed", "several ranks killed"), ("submit",), "there is neither a supervisor nor a rank yet"),
    (("corrupt bytes",), ("submit", "boot", "first batch", "during a restart", "epoch's edge", "before the result"),
     "what the run folder holds has no checksums; checkpoints have"),
    (("corrupt bytes",), ("half a file fetched",), "a folder tells no checksum of its files; object stores do"),
    (("corrupt bytes",), ("flush of metrics",), "a metric's line has no checksum; training does not read it"),
    (("disk full",), ("restore",), "nothing is written"),
    (("remote 5xx",), ("submit", "boot", "first batch", "during a restart", "epoch's edge", "before the result",
                       "flush of metrics"), "nothing remote is touched next"),
)  # fmt: skip


_LOST_THEN = ("LOST", "SUCCEEDED")
_FAILED_THEN = ("FAILED", "SUCCEEDED")
_RUN_FOLDER = "/home/runs/"
_OUTSIDE_THE_LOOP = ("boot", "restore", "during a restart", "before the result")
_SAYS = {
    "SIGKILL": "SIGKILL, signal 9", "several ranks killed": "SIGKILL, signal 9", "SIGTERM": "SIGTERM, signal 15",
    "exception": "RuntimeError: failpoint", "exit 0": "exit code 0", "SIGINT": "KeyboardInterrupt",
    "SIGSTOP": "no (step|loop) for", "held GIL": "no (step|loop) for",
}  # fmt: skip


def end_of(kind: Kind, moment: Moment) -> End:
    """What a kind at a moment has to come to."""
    end = _end_of(kind, moment)
    if moment.lost:
        return replace(end, states=tuple(("LOST", *states) for states in end.states))
    if moment.before:
        return replace(end, failures=tuple(count + 1 for count in end.failures))
    return end


def _end_of(kind: Kind, moment: Moment) -> End:
    if kind.name in ("clock jump", "slow I/O", "remote 5xx"):
        return End()
    if kind.name == "launcher killed":
        return End(states=(_LOST_THEN,), told="the supervisor of run .* vanished")
    if moment.where == "notebook":
        return _at_submit(kind)
    if kind.disk:
        return _of_disk(kind, moment)
    return _of_helper(kind, moment) if moment.where == "helper" else _of_worker(kind, moment)


def _at_submit(kind: Kind) -> End:
    """The run's folder is there, and no supervisor was started: that is seen, and the run can be."""
    told = {"exception": "RuntimeError: failpoint", "SIGINT": "KeyboardInterrupt"}.get(kind.name, "vanished")
    if kind.name == "I/O error once":
        return End(states=(_GOES_ON, _LOST_THEN))
    return End(states=(_LOST_THEN,), told="Error" if kind.disk else told)


def _of_disk(kind: Kind, moment: Moment) -> End:
    if kind.name == "corrupt bytes":  # then all is killed, so that what was written is read
        return End() if moment.lost else End(states=(_LOST_THEN,))
    if moment.name == "flush of metrics":  # lines are lost, and that is told; training does not notice
        return End(failures=(0, 1))
    if moment.name == "half a file fetched":  # the cache is passed by, unless not even its locks can be made
        return End(states=(_GOES_ON, _FAILED_THEN), failures=(0, 1))
    if moment.place == _RUN_FOLDER:  # where status and outcomes are: whoever writes first ends, the supervisor too
        states = (_GOES_ON, _LOST_THEN) if kind.name == "I/O error once" else (_LOST_THEN, _FAILED_THEN)
        return End(states=states, failures=(0, 1, 2))
    if kind.name == "disk full":
        return End(states=(_FAILED_THEN,), failures=(1,), told="No space left on device")
    if kind.name == "I/O error once":
        return End(failures=(0, 1), told="" if moment.reading else "Input/output error")
    return End(states=(_FAILED_THEN,), failures=(1, 2, 3, 4), told="Input/output error|cannot be read")


def _of_helper(kind: Kind, moment: Moment) -> End:
    """The process that finishes checkpoints is struck, not a rank."""
    if kind.name == "several ranks killed":
        return End(failures=(1,), told="SIGKILL, signal 9")
    if kind.name == "exception":
        return End(failures=(1,), told="RuntimeError|its writing failed")
    if kind.name == "SIGTERM":  # it finishes what it has in hand, whoever wants the node back
        return End()
    told = "did not answer" if kind.hangs else "the process that finishes checkpoints ended with exit status"
    return End(failures=(0, 1), told=told)  # what it was lost with: nothing, or a save that it had been given


def _of_worker(kind: Kind, moment: Moment) -> End:
    if moment.name == "half a file fetched" and kind.name == "exception":  # who only reads ahead leaves it to others
        return End(states=(_GOES_ON, _FAILED_THEN), failures=(0, 1))
    if kind.name == "SIGTERM" and moment.name not in _OUTSIDE_THE_LOOP:
        return End(told="got a signal to stop and goes on")
    if kind.name == "held GIL" and moment.name == "before the result":
        return End(states=(_FAILED_THEN,), told="did not end within timeout_seconds")
    if kind.name == "held GIL" and moment.point.startswith("job."):
        return End(failures=(1,), told=r"holds the GIL in _hold at .* \(native code that does not release it\)")
    fails = not moment.trained and kind.name in ("exception", "exit 0", "SIGINT", "SIGTERM")
    return End(states=(_FAILED_THEN,) if fails else (_GOES_ON,), failures=(1,), told=_SAYS[kind.name])


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One kind at one moment."""

    kind: Kind
    moment: Moment
    instead: str = ""  # fail-points, in place of its own

    @classmethod
    def of(cls, kind: str, moment: str, instead: str = "") -> Cell:
        return cls(kind=KINDS[kind], moment=MOMENTS[moment], instead=instead)

    @property
    def end(self) -> End:
        return end_of(self.kind, self.moment)

    @property
    def why_not(self) -> str:
        """Why it makes no sense; empty where it does."""
        for kinds, moments, why in _NO_SENSE:
            if self.kind.name in kinds and self.moment.name in moments:
                return why
        return ""

    @property
    def name(self) -> str:
        return f"{self.kind.name}, {self.moment.name}"

    @property
    def action(self) -> str:
        told = self.instead.rpartition("=")[2] if self.instead else self.kind.action
        return told.partition(":")[0]

    @property
    def failpoints(self) -> str:
        if self.instead:
            return self.instead
        after = "training.step@0%7!=launcher" if self.kind.name == "corrupt bytes" and not self.moment.lost else ""
        return "; ".join(filter(None, (self.moment.before, f"{self.moment.point}!={self.kind.action}", after)))

    @property
    def place(self) -> str:
        return self.moment.place

    @property
    def reading(self) -> bool:
        return self.moment.reading

    @property
    def strikes_disk(self) -> bool:
        return self.kind.disk

    @property
    def flips(self) -> bool:
        """Whether the fault is done with when it has fired."""
        return self.kind.name == "corrupt bytes" and self.moment.reading

    @property
    def policy(self) -> RestartPolicy:
        if not self.kind.hangs:
            return RestartPolicy(backoff_seconds=0.01)
        seconds = _HELPER_HANG_SECONDS if self.moment.where == "helper" else _HANG_SECONDS
        return RestartPolicy(backoff_seconds=0.01, hang_seconds=seconds, start_seconds=2 * seconds)

    @property
    def timeout_seconds(self) -> float | None:
        """What a function does after its loop is its own business; only the run's own limit ends it."""
        return 12.0 if "timeout_seconds" in self.end.told else None


def all_cells() -> Iterator[Cell]:
    for moment in MOMENTS:
        for kind in KINDS:
            yield Cell.of(kind, moment)
