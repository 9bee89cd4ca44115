"""Where a training loop reports to: its run folder, heartbeat slot, spool. Under an agent, torchrun, or nothing."""

from __future__ import annotations

import atexit
import os
import pathlib
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from sgpu import runtime, settings
from sgpu.contract import forwarding, process
from sgpu.contract.events import emit
from sgpu.contract.heartbeat import Page, Slot
from sgpu.contract.policies import CheckpointPolicy
from sgpu.contract.rundir import RunDir, runs_folder
from sgpu.contract.spec import RunSpec, Tracking, new_run_id, read_spec
from sgpu.contract.status import State, Status, read_status

_FOLDER_SECONDS = 60.0
_FORWARDER_SECONDS = 45.0


@dataclass(frozen=True, kw_only=True)
class Session:
    """What belongs to this rank of this run.

    Attributes:
        supervised: an agent watches; otherwise rank 0 keeps status.json itself.
        forwarder: the process that writes MLflow, where this rank had to start it.
    """

    run: RunDir
    slot: Slot
    rank: int
    world_size: int
    generation: int
    supervised: bool
    policy: CheckpointPolicy
    started_ns: int
    seed: int
    forwarder: subprocess.Popen[bytes] | None = None

    def seconds_since_start(self) -> float:
        """Since this rank of this generation was started."""
        return max(0.0, (time.monotonic_ns() - self.started_ns) / 1e9)

    def emit(self, kind: str, **facts: Any) -> None:
        emit(self.run, kind, generation=self.generation, rank=self.rank, **facts)

    def say(self, text: str) -> None:
        """One line from rank 0."""
        if self.rank == 0:
            print(f"sgpu: {text}", flush=True)

    def write_status(self, state: State, *, step: int = 0, epoch: int = 0, error: BaseException | None = None) -> None:
        """Without an agent, rank 0 says where the run stands."""
        if self.supervised or self.rank != 0:
            return
        now = time.time()
        before = read_status(self.run) or Status(state=state, updated=now, started=now)
        failure = None
        if error is not None:
            failure = {"kind": "exception", "rank": 0, "cause": type(error).__qualname__, "message": str(error)}
        status = replace(before, state=state, updated=now, step=step, epoch=epoch, failure=failure)
        if status.final:
            status = replace(status, ended=now)
            emit(self.run, "run_ended", generation=self.generation, state=state, message=str(error or ""))
        status.write(self.run)

    def settle_at_exit(self, *, step: int, epoch: int) -> None:
        """Without an agent: whether a loop that was left had failed shows when the process ends, by its exception."""

        def settle() -> None:
            error = getattr(sys, "last_value", None)  # set by the interpreter for an exception that nobody caught
            self.write_status("SUCCEEDED" if error is None else "FAILED", step=step, epoch=epoch, error=error)
            self.close(failed=error is not None)

        if not self.supervised:
            atexit.register(settle)

    def finish(self, *, over: bool) -> None:
        """Without an agent: this rank trains no more; where the run is not `over`, another process may go on."""
        if self.supervised:
            return
        self.slot.finish()
        if over:
            self.slot.close_ledger()

    def close(self, *, failed: bool = False) -> None:
        """Waits until MLflow has all, where this rank started the forwarder.

        Not where one of several ranks `failed`: their launcher waits to start them again. Nor for ever: the forwarder
        goes on without its parent, for as long as it takes itself.
        """
        if self.forwarder is None or (failed and self.world_size > 1):
            return
        try:
            self.forwarder.wait(_FORWARDER_SECONDS)
        except subprocess.TimeoutExpired:
            self.say(f"MLflow lacks the last metrics still; process {self.forwarder.pid} goes on bringing them there")


def open_session() -> Session:
    """The session of this process; makes a run folder where no agent did."""
    rank, world_size = runtime.rank(), runtime.world_size()
    root = settings.run_dir()
    if root is not None:
        run = RunDir(root)
        slot = Page(run.node(settings.node()).heartbeat).slot(rank)
        spec = read_spec(run)
        return Session(
            run=run, slot=slot, rank=rank, world_size=world_size, generation=settings.generation(), supervised=True,
            policy=spec.checkpoints, started_ns=process.began_ns(), seed=spec.seed,
        )  # fmt: skip
    restart = settings.torchrun_restart()
    if restart is None:
        run, generation = RunDir(runs_folder(settings.home()) / new_run_id("local")), 0
    else:
        run, generation = _torchrun_folder(), restart
    if rank == 0:
        _make(run, world_size)
    page = _page(run)
    slot = page.slot(rank)
    slot.start(generation)
    return Session(
        run=run, slot=slot, rank=rank, world_size=world_size, generation=generation, supervised=False,
        policy=CheckpointPolicy(), started_ns=process.began_ns(), seed=read_spec(run).seed,
        forwarder=_start_forwarder(run) if rank == 0 else None,
    )  # fmt: skip


def _torchrun_folder() -> RunDir:
    """The same for all ranks and all restarts of one torchrun on this node: named after the torchrun process."""
    parent = process.process_of(os.getppid())
    name = f"{parent.pid}-{parent.started}" if parent is not None else str(os.getppid())
    return RunDir(runs_folder(settings.home()) / f"torchrun-{name}")


def _make(run: RunDir, world_size: int) -> None:
    if run.spec.exists():
        return
    run.create()
    page = Page.create(run.heartbeat, world_size)
    page.close()
    process.this_process().write(run.agent)
    RunSpec(
        id=run.id, name=pathlib.Path(sys.argv[0]).stem or "local", created=time.time(), backend="none",
        world_size=world_size, gpus_per_node=world_size,
        accelerator="cuda" if runtime.device().type == "cuda" else "cpu",
        seed=secrets.randbits(31), tracking=_tracking(), python=sys.executable, working_dir=settings.working_dir(),
    ).write(run)  # fmt: skip


def _tracking() -> Tracking:
    uri = settings.tracking_uri() or f"sqlite:///{settings.home() / 'mlflow.db'}"
    return Tracking(uri=uri, experiment=settings.experiment_name())


def _page(run: RunDir) -> Page:
    """Rank 0 makes the folder; the others wait for it."""
    deadline = time.monotonic() + _FOLDER_SECONDS
    while not run.spec.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"rank 0 made no run folder at {run.root} within {_FOLDER_SECONDS:g} s; all ranks need the same "
                "SGPU_HOME"
            )
        time.sleep(0.02)
    return Page(run.heartbeat)


def _start_forwarder(run: RunDir) -> subprocess.Popen[bytes]:
    with run.forwarder_log.open("ab") as log:
        return subprocess.Popen(
            forwarding.command(run.root),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=run.root,  # a user's mlflow.py must not become the forwarder's
            start_new_session=True,  # torchrun ends the process groups of its workers before it starts them again
        )
