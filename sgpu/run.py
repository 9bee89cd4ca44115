"""A run, seen from outside: its folder is all there is. Nothing here talks to a process except to end it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sgpu import endings, leftovers, resuming, settings, standing, widgets
from sgpu.contract import records
from sgpu.contract.errors import InputError
from sgpu.contract.rundir import RunDir, all_runs, find_run
from sgpu.contract.spec import RunSpec, read_spec
from sgpu.contract.status import Status

if TYPE_CHECKING:
    from sgpu.checkpoint import Catalog
    from sgpu.metrics.ledger import GoodputReport


class Run:
    """One call of a decorated function. Shows itself live in a notebook; `Run.open(id)` finds it again."""

    def __init__(self, run_dir: RunDir) -> None:
        self._dir = run_dir
        self._spec: RunSpec | None = None

    @classmethod
    def open(cls, id_or_path: str) -> Run:
        """A run by its id (or the start or end of it, where that is enough), or by its folder.

        Raises:
            InputError: there is none, or several.
        """
        return cls(find_run(settings.home(), str(id_or_path)))

    def __fspath__(self) -> str:
        """So that whatever takes a run's folder takes the run."""
        return self.path

    @property
    def id(self) -> str:
        return self._dir.id

    @property
    def path(self) -> str:
        """The run's folder."""
        return str(self._dir.root)

    @property
    def spec(self) -> RunSpec:
        if self._spec is None:
            self._spec = read_spec(self._dir)
        return self._spec

    @property
    def status(self) -> Status:
        """Where the run stands. A run whose supervisor vanished is LOST, whatever it wrote last."""
        return standing.status_of(self._dir)

    @property
    def state(self) -> str:
        """STARTING, RUNNING, RESTARTING, SUCCEEDED, FAILED, CANCELLED, PREEMPTED or LOST."""
        return self.status.state

    def wait(self, timeout_seconds: float | None = None, *, each_turn: Callable[[], object] | None = None) -> str:
        """Waits for the end; the final state. The metrics' last way to MLflow may take a few seconds more.

        Args:
            timeout_seconds: None: without limit.
            each_turn: called while waiting, about twenty times a second.

        Raises:
            TimeoutError: it has not ended; it goes on.
            InputError: it is this process' own loop, and there is no limit.
        """
        return standing.wait(self._dir, timeout_seconds, each_turn=each_turn)

    def result(self, timeout_seconds: float | None = None) -> list[Any]:
        """One value a rank, in rank order.

        Raises:
            the first failing rank's own exception, with its remote traceback as the cause
            WorkerLostError, HangError, CrashLoopError, AgentLostError, RunCancelledError: what ended it instead
            ResultError: a rank's value could not be pickled
            TimeoutError: it has not ended
        """
        self.wait(timeout_seconds)
        status = self.status
        if status.state != "SUCCEEDED":
            raise endings.error_of(self._dir, status)
        ranks = range(status.world_size or self.spec.world_size)
        return [endings.result_of(self._dir, status.generation, rank) for rank in ranks]

    def cancel(self) -> None:
        """Ends every process of the run; a training loop saves a checkpoint first if it can within seconds."""
        standing.cancel(self._dir)

    def resume(self, step: int | None = None) -> Run:
        """Starts a run that ended without success again, from its newest valid checkpoint; the same run, the same id.

        Args:
            step: of the checkpoint to go on from; None: the newest valid one. Where the run would not take this one by
                itself (an older step, or a run that is running or has succeeded), a new run begins there: the same
                function, arguments and seed, in a folder of its own; this run stays as it is.

        Returns:
            The run that goes on.

        Raises:
            InputError: without a step, it is running or it succeeded; a step that is no whole number.
            CheckpointNotFoundError, CheckpointCorruptError: there is no such valid step.
        """
        began = resuming.resume(self._dir, self.status, step)
        return self if began == self._dir else Run(began)

    def logs(self, rank: int | None = None) -> str:
        """What a rank printed, over all generations; None: all ranks, one after the other."""
        world = self.spec.world_size
        if rank is not None and rank not in range(world):
            raise InputError(f"rank must be 0 to {world - 1} for run {self.id}; found {rank!r}")
        ranks = range(world) if rank is None else [rank]
        parts = []
        for each in ranks:
            for generation in self._dir.generations():
                log = self._dir.log(generation, each)
                if log.exists():
                    text = log.read_bytes().decode(errors="replace")
                    parts.append(f"--- rank {each}, generation {generation}: {log}\n{text}" if rank is None else text)
        return "".join(parts)

    def events(self) -> list[dict[str, Any]]:
        """What happened, oldest first; see docs/run-folder.md for the kinds."""
        return records.read_all(self._dir.events)

    def metrics(self, name: str | None = None) -> Any:
        """`{name: [(step, value), ...]}`, or the list of one name."""
        from sgpu.metrics.spool import series

        found = series(self._dir)
        if name is None:
            return found
        if name not in found:
            raise InputError(f"run {self.id} has no metric {name!r}; it has {sorted(found)}")
        return found[name]

    def checkpoints(self) -> Catalog:
        """The catalog of the run's checkpoint folder."""
        from sgpu.checkpoint import Catalog

        return Catalog(resuming.root_of(self._dir, self.spec))

    def goodput(self) -> GoodputReport:
        """Where every second of every rank went so far."""
        from sgpu.metrics.ledger import from_page

        alive = standing.has_agent(self._dir)
        return from_page(self._dir.heartbeat, time.monotonic_ns() if alive else None)

    def __repr__(self) -> str:
        status = self.status
        return f"<Run {self.id}: {status.state}, step {status.step}>"

    def _ipython_display_(self) -> None:
        widgets.show(self._dir, self.cancel).start()


def runs() -> list[Run]:
    """All runs of this home, newest first."""
    return [Run(run_dir) for run_dir in all_runs(settings.home())]


def attach(id_or_path: str) -> Run:
    """The same as `Run.open`: a run that another notebook, or this one before its restart, had started."""
    return Run.open(id_or_path)


def cleanup() -> list[str]:
    """Ends and removes what dead runs left on this machine; one sentence for each thing that it was."""
    return leftovers.remove(settings.home())
