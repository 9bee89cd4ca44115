"""Starting the job under torchrun and under sgpu, each in a folder of its own."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import sgpu
from sgpu.contract import process
from tests.benchmarks import jobs

_ROOT = pathlib.Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Started:
    """A job under way.

    Attributes:
        began: the time of the call, seconds since 1970.
        lose_node: kills all of the second node.
        resumes: by the fault, how many of the two ranks begin anew: some leave the others as they are, or do without.
    """

    folder: str
    began: float
    wait: Callable[[float], bool]
    restarts: Callable[[], int | None]
    lose_node: Callable[[], None] = lambda: None
    resumes: Callable[[str], int] = lambda _fault: 2


def kill_tree(pid: int) -> None:
    family = [pid, *process.descendants(pid)]
    for each in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def start_sgpu(
    folder: str, *, total: int, every: int, nodes: int = 1, spares: int = 0, hang_seconds: float | None = None
) -> Started:
    began = time.time()
    policy = sgpu.RestartPolicy(max_restarts=20, backoff_seconds=0.0, hang_seconds=hang_seconds)
    on = sgpu.Local(nodes=nodes, spares=spares)
    run = sgpu.distributed(gpus=2, name="bench", on=on, restarts=policy)(jobs.in_harness).submit(folder, total, every)

    def wait(seconds: float) -> bool:
        try:
            return run.wait(seconds) == "SUCCEEDED"
        except TimeoutError:
            run.cancel()
            return False

    def lose_node() -> None:
        agent = process.read_process(pathlib.Path(run.path) / "nodes" / "1" / "agent.json")
        assert agent is not None
        kill_tree(agent.pid)

    return Started(folder=folder, began=began, wait=wait, restarts=lambda: run.status.restarts, lose_node=lose_node)


class Job:
    """One agent a node, on this machine."""

    def __init__(
        self, folder: str, arguments: list[str], job: list[str], *, launcher: tuple[str, ...] = (), **environment: str
    ) -> None:
        self._folder = folder
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        launcher = launcher or (sys.executable, "-m", "torch.distributed.run")
        self._length = len(launcher)
        self._command = [*launcher, *arguments, "-m", "tests.benchmarks.jobs", *job]
        self._log = open(os.path.join(folder, "torchrun.log"), "ab")  # noqa: SIM115 - lives as long as the processes
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> None:
        command = [*self._command[: self._length], *arguments, *self._command[self._length :]]
        self.agents.append(
            subprocess.Popen(
                command, stdout=self._log, stderr=self._log, cwd=_ROOT, env=self._environment,
                start_new_session=True,
            )
        )  # fmt: skip

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        try:
            return all(agent.wait(max(0.0, deadline - time.monotonic())) == 0 for agent in self.agents)
        except subprocess.TimeoutExpired:
            return False
        finally:
            for agent in self.agents:
                kill_tree(agent.pid)
                agent.wait()
            for pid in {line["pid"] for line in jobs.lines(self._folder)}:  # its workers are in sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._log.close()

    def restarts(self) -> int:
        return len({line["life"] for line in jobs.lines(self._folder) if line["rank"] == 0}) - 1


def start_torchrun(
    folder: str, *, total: int, every: int, own_store: bool = False, hang_seconds: float | None = None
) -> Started:
    """`hang_seconds`: the time-out of the process group, the one thing that ends a hang here."""
    began = time.time()
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if own_store else {}
    if hang_seconds is not None:
        environment["BENCH_GROUP_SECONDS"] = str(hang_seconds)
    job = Job(
        folder, ["--standalone", "--nproc-per-node", "2", "--max-restarts", "20"], [folder, str(total), str(every)],
        **environment,
    )  # fmt: skip
    job.start()
    return Started(folder=folder, began=began, wait=job.wait, restarts=job.restarts)


def start_torchrun_nodes(folder: str, *, total: int, every: int, own_store: bool) -> Started:
    """Two agents, the first of which hosts the store; a lost one is started again at once.

    `own_store`: the workers get a store of their own, instead of the agents' with what is left in it.
    """
    began = time.time()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    job = Job(
        folder,
        ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "bench",
         "--nproc-per-node", "1", "--max-restarts", "3"],
        [folder, str(total), str(every)],
        **({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if own_store else {}),
    )  # fmt: skip
    for node in range(2):
        job.start("--node-rank", str(node), "--rdzv-conf", f"is_host={1 - node}")

    def lose_node() -> None:
        lost = job.agents.pop()
        kill_tree(lost.pid)
        lost.wait()
        job.start("--node-rank", "1", "--rdzv-conf", "is_host=0")

    return Started(folder=folder, began=began, wait=job.wait, restarts=job.restarts, lose_node=lose_node)


PEERS: dict[str, Callable[..., Started]] = {
    "sgpu": start_sgpu,
    "torchrun": start_torchrun,
    "torchrun, own store": functools.partial(start_torchrun, own_store=True),
}
NODE_PEERS = {
    "sgpu": functools.partial(start_sgpu, nodes=2),
    "sgpu, warm spare": functools.partial(start_sgpu, nodes=2, spares=1),
    "torchrun": functools.partial(start_torchrun_nodes, own_store=False),
    "torchrun, own store": functools.partial(start_torchrun_nodes, own_store=True),
}
