"""Runs made by hand, checkpoints made by torch, and the command line as a function."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from sgpu.cli import app
from sgpu.contract import payload
from sgpu.contract.policies import CheckpointPolicy, RestartPolicy
from sgpu.contract.rundir import RunDir, runs_folder
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.contract.status import Status

CREATED = 1_800_000_000.0


@pytest.fixture
def sgpu() -> Callable[..., Any]:
    """`sgpu("runs")`: the result has exit_code, stdout, stderr."""

    def call(*arguments: object) -> Any:
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


@pytest.fixture
def make_run(home: pathlib.Path) -> Callable[..., RunDir]:
    """A run's folder as its launcher and agent leave it."""

    def make(
        run_id: str,
        *,
        state: Any = "SUCCEEDED",
        function: Any = None,
        checkpoints: str | None = None,
        world: int = 1,
        nodes: int = 1,
        **fields: Any,
    ) -> RunDir:
        run = RunDir(runs_folder(home) / run_id)
        run.create()
        RunSpec(
            id=run_id, name="train", created=CREATED, backend="local", world_size=world,
            gpus_per_node=world // nodes, accelerator="cpu", seed=7,
            tracking=Tracking(uri=f"sqlite:///{home}/mlflow.db", experiment="test"),
            python=sys.executable, working_dir=str(home), checkpoints=CheckpointPolicy(root=checkpoints),
            restarts=RestartPolicy(max_restarts=0), **fields,
        ).write(run)  # fmt: skip
        run.payload.write_bytes(payload.pack(function or (lambda: None), (), {}, limit_bytes=10**6))
        if state is not None:
            Status(state=state, updated=CREATED + 90, started=CREATED, ended=CREATED + 90, step=30).write(run)
        return run

    return make
