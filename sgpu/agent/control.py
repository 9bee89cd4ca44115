"""The life of the first node's agent: everything that a run needs is opened, supervised, and closed again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from sgpu import settings
from sgpu.agent.checkpoint_helper import CheckpointHelper
from sgpu.agent.forwarder import Forwarder
from sgpu.agent.hosting.healthy_host import watched
from sgpu.agent.hosting.zygote_host import ZygoteHost
from sgpu.agent.network import agent_environment
from sgpu.agent.nodes.cluster import ClusterHost
from sgpu.agent.nodes.connections import Nodes
from sgpu.agent.nodes.starter import NodeStarter
from sgpu.agent.notices import Notice
from sgpu.agent.supervising.supervisor import Supervisor
from sgpu.agent.workers import WorkerHost
from sgpu.contract import process
from sgpu.contract.clock import SystemClock
from sgpu.contract.exits import exit_code
from sgpu.contract.heartbeat import Page, last_sign_ns
from sgpu.contract.process import ProcessId
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.contract.status import Status, read_status

_FORWARDER_SECONDS = 45.0
CHECKPOINT_SECONDS = 60.0

Asked = Callable[[], Notice | None]


class StopReasons:
    """Why the run should end, if it should: the cancel file, a dead launcher, a node that is to be given back.

    A `resumed` run does not wait for a launcher that was gone before.
    """

    def __init__(self, run: RunDir, spec: RunSpec, *, resumed: bool, asked: list[Asked]) -> None:
        self._run, self._asked = run, asked
        self._launcher: ProcessId | None = None
        if spec.on_launcher_exit == "stop" and spec.launcher is not None:
            launcher = ProcessId(**spec.launcher)
            self._launcher = launcher if launcher.alive() or not resumed else None

    def __call__(self) -> str | None:
        if self._run.cancel.exists():
            return "cancel"
        if self._launcher is not None and not self._launcher.alive():
            return "cancel"
        return "preempt" if self.notice() is not None else None

    def notice(self) -> Notice | None:
        """Of the first node that has one."""
        return next((notice for ask in self._asked if (notice := ask()) is not None), None)


def control(run: RunDir, spec: RunSpec, *, address: str, gpus: str | None, asked: Asked) -> int:
    """Supervises the run to its end; the exit status. A run that has ended for good is left as it is."""
    before = read_status(run)
    if before is not None and before.final and not exit_code(before).goes_on:
        more = "nothing is left to do" if before.state == "SUCCEEDED" else f"go on with it by: sgpu resume {run.id}"
        print(f"sgpu: run {run.id} is {before.state}; {more}", flush=True)
        return exit_code(before)
    process.this_process().write(run.agent)
    environment = agent_environment(spec, address=address, gpus=gpus)
    forwarder = Forwarder(run, python=spec.python, environment=environment)
    try:
        status = _supervise(run, spec, address, environment, forwarder, asked)
    except BaseException:
        _tell_lost(run)
        raise
    finally:
        forwarder.finish(_FORWARDER_SECONDS, generation=0)
    return exit_code(status)


def _supervise(
    run: RunDir, spec: RunSpec, address: str, environment: dict[str, str], forwarder: Forwarder, asked: Asked
) -> Status:
    clock, generations = SystemClock(), run.generations()
    page = open_page(run, spec, resume=True)
    with ExitStack() as stack:
        helper = CheckpointHelper(
            run, spec, node=0, address=address, log=run.agent_log, environment=environment
        )  # fmt: skip
        starter = NodeStarter(run, python=spec.python)
        stack.callback(starter.close)
        stack.callback(helper.close, CHECKPOINT_SECONDS)
        host: WorkerHost
        host = local = watched(
            lambda checks: ZygoteHost(
                python=spec.python, run=run.root, environment={**environment, "SGPU_CHECKPOINT_HELPER": helper.name},
                log=run.agent_log, address=address,
                spared=lambda: [*checks(), *forwarder.pids(), *helper.pids(), *starter.pids()],
            ),
            run, spec, node=0, visible=environment.get("CUDA_VISIBLE_DEVICES"),
        )  # fmt: skip
        reasons = [asked]
        if spec.nodes > 1:
            for node in run.other_nodes():
                if run.node(node).heartbeat.exists():
                    open_page(run.node(node), spec, resume=True)
            count = spec.nodes - 1 + spec.spares
            nodes = Nodes(address, count, clock=clock, timeout_seconds=settings.node_timeout_seconds())
            host = cluster = ClusterHost(run, spec, local=local, nodes=nodes, page=page, clock=clock, starter=starter)
            reasons.append(cluster.notice)
            nodes.publish(run)
        stack.callback(host.close)
        host.open()
        helper.open()
        forwarder.keep_running()
        reason = StopReasons(run, spec, resumed=bool(generations), asked=reasons)
        return Supervisor(
            run, spec, host=host, page=page, clock=clock, address=address, stop_reason=reason, notice=reason.notice,
            preempt_seconds=settings.preempt_seconds(),
            first_generation=generations[-1] + 1 if generations else 0,
        ).supervise()  # fmt: skip


def open_page(folder: RunDir, spec: RunSpec, *, resume: bool) -> Page:
    """A node's heartbeat page; that of an earlier agent is gone on with.

    Args:
        resume: the run had ended: the time since then was nobody's. So it is where the machine was started anew.
    """
    if not folder.heartbeat.exists():
        return Page.create(folder.heartbeat, spec.world_size)
    page = Page(folder.heartbeat)
    if resume or last_sign_ns(page.beats()) > time.monotonic_ns():
        page.resume()
    return page


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
