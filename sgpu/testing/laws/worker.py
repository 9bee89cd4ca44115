"""A run folder, and being one of its workers, as an agent would have it: nothing else is started for such a run."""

from __future__ import annotations

import pathlib
import sys
import time

from sgpu import settings
from sgpu.contract.heartbeat import Page
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking


def make_run(root: pathlib.Path, *, world_size: int, seed: int = 1) -> None:
    """Makes the folder of a run of so many workers on this machine."""
    run = RunDir(root)
    run.create()
    Page.create(run.heartbeat, world_size).close()
    RunSpec(
        id=run.id, name="law", created=time.time(), backend="local", world_size=world_size, gpus_per_node=world_size,
        accelerator="cpu", seed=seed, tracking=Tracking(uri="", experiment="law"), python=sys.executable,
        working_dir=str(root),
    ).write(run)  # fmt: skip


def become_worker(root: pathlib.Path, *, rank: int, world_size: int) -> None:
    """Makes this process a worker of that run."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    settings.adopt({"SGPU_RUN_DIR": str(root), **{name: str(value) for name, value in numbers.items()}})
