"""Starting the job under torchrun and under sgpu, each in a folder of its own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import sgpu
from tests.benchmarks import jobs

_ROOT = pathlib.Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Started:
    """A job under way. `began` is the time of the call (seconds since 1970)."""

    folder: str
    began: float
    wait: Callable[[float], bool]
    restarts: Callable[[], int | None]


def start_sgpu(folder: str, *, total: int, every: int) -> Started:
    began = time.time()
    run = sgpu.distributed(gpus=2, name="bench")(jobs.in_harness).submit(folder, total, every)
    return Started(
        folder=folder,
        began=began,
        wait=lambda seconds: run.wait(seconds) == "SUCCEEDED",
        restarts=lambda: run.status.restarts,
    )


def start_torchrun(folder: str, *, total: int, every: int) -> Started:
    log = open(os.path.join(folder, "torchrun.log"), "wb")  # noqa: SIM115 - lives as long as the process
    began = time.time()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "--max-restarts", "3", "-m", "tests.benchmarks.jobs", folder, str(total), str(every),
        ],
        stdout=log, stderr=log, cwd=_ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip

    def wait(seconds: float) -> bool:
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pid in {line["pid"] for line in jobs.lines(folder)}:  # its workers are in sessions of their own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return False
        finally:
            log.close()

    def restarts() -> int | None:
        return len({line["pid"] for line in jobs.lines(folder) if line["rank"] == 0}) - 1

    return Started(folder=folder, began=began, wait=wait, restarts=restarts)


PEERS = {"sgpu": start_sgpu, "torchrun": start_torchrun}
