"""A supervised run folder for loops that run inside the test's own process, and ranks from script text."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import pytest

from sgpu.contract.errors import CheckpointSaveError
from sgpu.contract.heartbeat import Page, Slot
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.training.preemption import forget_requests
from tests.training.looping import Training

REPOSITORY = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def each_waits_for_its_agents(agents_end: None) -> None:
    """What that fixture does, for every test here."""


@pytest.fixture
def supervised(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[RunDir, Slot]]:
    """Makes this process the only worker of a new run, as an agent would; each call is another run."""
    count = 0

    def begin() -> tuple[RunDir, Slot]:
        nonlocal count
        count += 1
        run = RunDir(tmp_path / "runs" / f"run{count}")
        run.create()
        page = Page.create(run.heartbeat, 1)
        RunSpec(
            id=run.id, name="test", created=time.time(), backend="local", world_size=1, gpus_per_node=1,
            accelerator="cpu", seed=1, tracking=Tracking(uri="", experiment="test"), python=sys.executable,
            working_dir=str(tmp_path),
        ).write(run)  # fmt: skip
        for name, value in {"SGPU_RUN_DIR": str(run.root), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        slot = page.slot(0)
        slot.start(0)
        return run, slot

    return begin


@pytest.fixture
def script(tmp_path: pathlib.Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python text in a process of its own, started by `launcher` where one is given."""
    count = 0

    def run(
        text: str, *arguments: str, launcher: tuple[str, ...] = (), **environment: str
    ) -> subprocess.CompletedProcess[str]:
        nonlocal count
        count += 1
        path = tmp_path / f"train{count}.py"
        path.write_text(textwrap.dedent(text))
        return subprocess.run(
            [sys.executable, *launcher, str(path), *arguments],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            capture_output=True, text=True, timeout=100, check=False, cwd=tmp_path,
        )  # fmt: skip

    return run


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """A supervised loop that was left leaves much to the end of its process; here there is none."""
    yield
    forget_requests()
    while Training.made:
        with contextlib.suppress(CheckpointSaveError):
            Training.made.pop().loop._checkpointer.close()


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "checkpoints"
