"""NVRx and torchft, from an environment of their own that BENCH_PEERS names; see docs/benchmarks.md."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable

from tests.benchmarks import jobs
from tests.benchmarks.peers import Job, Started, kill_tree

_ROOT = pathlib.Path(__file__).parents[2]
_TOOLS = pathlib.Path(os.environ.get("BENCH_PEERS", ""))
_END_SECONDS = 5.0  # once one rank of a job has ended, the others have


def start_launcher(folder: str, *, total: int, every: int, hang_seconds: float | None = None) -> Started:
    """NVRx' launcher; its ranks tell it that they live after each step."""
    began = time.time()
    limit = str(hang_seconds if hang_seconds is not None else 600.0)
    job = Job(
        folder,
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nnodes", "1", "--nproc-per-node", "2",
         "--max-restarts", "20", "--ft-rank-heartbeat-timeout", limit, "--ft-initial-rank-heartbeat-timeout", "60",
         "--ignore-missing-fault-tol-cfg"],
        [folder, str(total), str(every)],
        launcher=(str(_TOOLS / "ft_launcher"),), BENCH_NVRX="1", PYTHONPATH=str(_ROOT),
    )  # fmt: skip
    job.start()
    return Started(folder=folder, began=began, wait=job.wait, restarts=job.restarts)


class _Processes:
    """Of which each is a rank, or the keeper of one."""

    def __init__(self, folder: str, total: int, every: int, hang_seconds: float | None) -> None:
        self._folder, self._job = folder, [folder, str(total), str(every)]
        limit = {"BENCH_HANG_SECONDS": str(hang_seconds)} if hang_seconds is not None else {}
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT), **limit}
        self._environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # its store is asked ten times a second, and tells each time
        self._log = open(os.path.join(folder, "log"), "ab")  # noqa: SIM115 - lives as long as the processes
        self.began = time.time()
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.helpers: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **environment: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command, stdout=self._log, stderr=self._log, cwd=_ROOT, env={**self._environment, **environment},
            start_new_session=True,
        )  # fmt: skip

    def start_rank(self, kind: str, *launcher: str, **environment: str) -> None:
        command = [str(_TOOLS / "python"), *launcher, "-m", "tests.benchmarks.peer_jobs", kind, *self._job]
        self.ranks.append(self.start(command, **environment))

    def wait(self, seconds: float) -> bool:
        """Whether it came to its end in at least one rank, and no rank failed otherwise than by being killed."""
        deadline = time.monotonic() + seconds
        statuses: list[int | None] = []
        for rank in self.ranks:
            try:
                statuses.append(rank.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                statuses.append(None)
            if 0 in statuses:
                deadline = min(deadline, time.monotonic() + _END_SECONDS)
        pids = {line["pid"] for line in jobs.lines(self._folder)}
        for each in (*self.ranks, *self.helpers):
            kill_tree(each.pid)
            each.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._log.close()
        return 0 in statuses and {*statuses} <= {0, -signal.SIGKILL}

    def new_lives(self) -> int:
        return len({line["life"] for line in jobs.lines(self._folder)}) - len(self.ranks)


def start_in_process(folder: str, *, total: int, every: int, hang_seconds: float | None = None) -> Started:
    """NVRx' in-process wrapper: who is killed is done without from then on."""
    started, port = _Processes(folder, total, every, hang_seconds), str(free_port())
    for rank in ("0", "1"):
        started.start_rank(
            "nvrx", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
        )

    def restarts() -> int:
        return min(1, started.new_lives()) if started.new_lives() <= 2 else started.new_lives()

    return Started(
        folder=folder, began=started.began, wait=started.wait, restarts=restarts,
        resumes=lambda fault: 2 if fault in ("exception", "Python loop") else 1,
    )  # fmt: skip


def start_torchft(folder: str, *, total: int, every: int, hang_seconds: float | None = None) -> Started:
    """Two replica groups of one rank, each under a torchrun of its own, which starts it again; the other waits."""
    started, port = _Processes(folder, total, every, hang_seconds), free_port()
    lighthouse = [str(_TOOLS / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}", "--min_replicas", "2"]
    lighthouse += ["--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000", "--quorum_tick_ms", "50"]
    started.helpers.append(started.start(lighthouse))
    for rank in ("0", "1"):
        started.start_rank(
            "torchft", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "20",
            BENCH_REPLICA=rank, TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}",
        )  # fmt: skip
    return Started(
        folder=folder, began=started.began, wait=started.wait, restarts=started.new_lives, resumes=lambda _fault: 1
    )


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def here() -> dict[str, Callable[..., Started]]:
    """Those that the environment has."""
    ways: dict[str, Callable[..., Started]] = {}
    if (_TOOLS / "ft_launcher").is_file():
        ways |= {"NVRx launcher": start_launcher, "NVRx in-process": start_in_process}
    if (_TOOLS / "torchft_lighthouse").is_file():
        ways["torchft"] = start_torchft
    return ways
