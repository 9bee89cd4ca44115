"""`python -m sgpu.agent RUN_DIR`: supervises one run on this node to its end.

Exit status: 0 succeeded, 1 failed, 2 cancelled, 75 preempted (start it again).
"""

from __future__ import annotations

import pathlib
import signal
import sys
import threading
import time

from sgpu import settings
from sgpu.agent.checkpoint_helper import CheckpointHelper
from sgpu.agent.forwarder import Forwarder
from sgpu.agent.supervisor import Supervisor
from sgpu.agent.workers import ZygoteHost
from sgpu.contract import process
from sgpu.contract.clock import SystemClock
from sgpu.contract.heartbeat import Page
from sgpu.contract.process import ProcessId
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, read_spec
from sgpu.contract.status import Status, read_status

_EXIT = {"SUCCEEDED": 0, "FAILED": 1, "CANCELLED": 2, "PREEMPTED": 75}
_FORWARDER_SECONDS = 45.0
_CHECKPOINT_SECONDS = 60.0


def _environment(spec: RunSpec) -> dict[str, str]:
    """What every process of the run starts with; the user's own `env` wins."""
    inherited = settings.inherited()
    defaults = {
        "OMP_NUM_THREADS": "1",  # as torchrun: workers share the cores
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        inherited.pop(name, None)
    return {**defaults, **inherited, **spec.environment}


class StopReasons:
    """Why the run should end, if it should: asked by the loop, set by signals, the cancel file, a dead launcher.

    A `resumed` run does not wait for a launcher that was gone before.
    """

    def __init__(self, run: RunDir, spec: RunSpec, *, resumed: bool = False) -> None:
        self._run = run
        self._launcher: ProcessId | None = None
        if spec.on_launcher_exit == "stop" and spec.launcher is not None:
            launcher = ProcessId(**spec.launcher)
            self._launcher = launcher if launcher.alive() or not resumed else None
        self._preempted = threading.Event()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda *_: self._preempted.set())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the notebook arrives as a cancel
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def __call__(self) -> str | None:
        if self._run.cancel.exists():
            return "cancel"
        if self._launcher is not None and not self._launcher.alive():
            return "cancel"
        return "preempt" if self._preempted.is_set() else None


def _supervise(run: RunDir, spec: RunSpec, forwarder: Forwarder) -> Status:
    environment = _environment(spec)
    helper = CheckpointHelper(run, python=spec.python, ranks=spec.world_size, environment=environment)
    host = ZygoteHost(
        python=spec.python, run=run.root, environment={**environment, "SGPU_CHECKPOINT_HELPER": helper.name},
        log=run.agent_log, spared=lambda: [*forwarder.pids(), *helper.pids()],
    )  # fmt: skip
    host.open()
    helper.open()
    forwarder.keep_running()
    generations = run.generations()
    page = _page(run, spec)
    try:
        return Supervisor(
            run, spec, host=host, page=page, clock=SystemClock(),
            stop_reason=StopReasons(run, spec, resumed=bool(generations)),
            first_generation=generations[-1] + 1 if generations else 0,
        ).supervise()  # fmt: skip
    finally:
        host.close()
        helper.close(_CHECKPOINT_SECONDS)


def _page(run: RunDir, spec: RunSpec) -> Page:
    """The run's heartbeat page; that of an earlier agent is gone on with, unless the machine was started anew since."""
    if run.heartbeat.exists():
        page = Page(run.heartbeat)
        if all(beat.beat_ns <= time.monotonic_ns() for beat in page.beats()):
            for rank in range(spec.world_size):
                page.slot(rank).resume()
            return page
    return Page.create(run.heartbeat, spec.world_size)


def main() -> int:
    run = RunDir(pathlib.Path(sys.argv[1]).absolute())
    spec = read_spec(run)
    process.this_process().write(run.agent)
    forwarder = Forwarder(run, python=spec.python, environment=_environment(spec))
    try:
        status = _supervise(run, spec, forwarder)
    except BaseException:
        _tell_lost(run)
        raise
    finally:
        forwarder.finish(_FORWARDER_SECONDS, generation=0)
    return _EXIT.get(status.state, 1)


def _tell_lost(run: RunDir) -> None:
    """The supervisor itself fails: the run must not look as if it went on."""
    before = read_status(run)
    if before is not None and before.final:  # what failed was clearing up; its traceback is in the agent's log
        return
    now = SystemClock().wall()
    Status(
        state="LOST",
        updated=now,
        started=before.started if before else now,
        ended=now,
        step=before.step if before else 0,
        failure={"kind": "agent", "rank": None, "cause": "the supervisor failed", "message": f"see {run.agent_log}"},
    ).write(run)


if __name__ == "__main__":
    sys.exit(main())
