"""The life of the agent of any other node, from finding the controller to the end of its workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from sgpu import settings
from sgpu.agent.checkpoint_helper import CheckpointHelper
from sgpu.agent.control import CHECKPOINT_SECONDS, open_page
from sgpu.agent.hosting.healthy_host import watched
from sgpu.agent.hosting.zygote_host import ZygoteHost
from sgpu.agent.network import agent_environment
from sgpu.agent.nodes.cluster import JOIN_SECONDS
from sgpu.agent.nodes.follower import Follower, Place, find_controller
from sgpu.agent.nodes.link import LinkLostError
from sgpu.agent.notices import Notice
from sgpu.contract import process
from sgpu.contract.clock import SystemClock
from sgpu.contract.events import emit
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.metrics.machine import Sampler
from sgpu.metrics.node import watch_node


def follow(
    run: RunDir, spec: RunSpec, node: int, *, address: str, gpus: str | None, asked: Callable[[], Notice | None]
) -> int:
    """Serves the run's controller until the run ends or the controller is lost; the exit status."""
    clock, folder = SystemClock(), run.node(node)
    folder.root.mkdir(parents=True, exist_ok=True, mode=0o700)
    process.this_process().write(folder.agent)
    with ExitStack() as stack:
        try:
            link = find_controller(
                run, node, address=address, clock=clock, timeout_seconds=settings.node_timeout_seconds(),
                patience_seconds=JOIN_SECONDS,
            )  # fmt: skip
            if link is None:
                return 0
            stack.callback(link.close)  # last: the controller takes it for the end of all that was here
            environment = agent_environment(spec, address=link.own_address, gpus=gpus)
            helpers: list[CheckpointHelper] = []
            samplers: list[Sampler] = []
            host = watched(
                lambda checks: ZygoteHost(
                    python=spec.python, run=run.root, environment=environment, log=folder.agent_log,
                    spared=lambda: [*checks(), *(pid for helper in helpers for pid in helper.pids())],
                ),
                run, spec, node=node, visible=environment.get("CUDA_VISIBLE_DEVICES"),
            )  # fmt: skip
            stack.callback(_close, helpers, samplers)
            stack.callback(host.close)
            host.open()

            def take(place: int, own_address: str = link.own_address) -> Place:
                own = run.node(place)
                own.root.mkdir(parents=True, exist_ok=True, mode=0o700)
                helper = CheckpointHelper(
                    run, spec, node=place, address=own_address, log=folder.agent_log, environment=environment
                )  # fmt: skip
                helpers.append(helper)
                helper.open()
                page = open_page(own, spec, resume=False)
                sampler = watch_node(run, spec, place, page.beats, environment=environment, deliver=False)
                samplers.append(sampler)
                sampler.start()
                return Place(
                    page=page,
                    environment={"SGPU_CHECKPOINT_HELPER": helper.name, "SGPU_NODE": str(place)},
                )  # fmt: skip

            place = take(node) if node < spec.nodes else None
            Follower(place, take=take, link=link, host=host, clock=clock, asked=asked).serve()
        except LinkLostError as error:
            emit(
                run, "warning", generation=max(run.generations(), default=0),
                message=f"node {node} has lost its controller ({error}); its workers are ended",
            )  # fmt: skip
            return 1
    return 0


def _close(helpers: list[CheckpointHelper], samplers: list[Sampler]) -> None:
    for sampler in samplers:
        sampler.stop()
    for helper in helpers:
        helper.close(CHECKPOINT_SECONDS)
