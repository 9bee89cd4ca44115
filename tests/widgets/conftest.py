"""Run folders made by hand."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

from sgpu.contract import records
from sgpu.contract.process import this_process
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.contract.status import Status
from sgpu.widgets.checkpoints.place import find_place
from sgpu.widgets.checkpoints.rows import Shelf

HERE = pathlib.Path(__file__).parent


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class HandMadeRun:
    """A run folder, written without agent and workers."""

    def __init__(self, root: pathlib.Path, *, world_size: int, name: str, created: float) -> None:
        self.dir = RunDir(root)
        self.created = created
        self.dir.create()
        RunSpec(
            id=root.name,
            name=name,
            created=created,
            backend="local",
            world_size=world_size,
            gpus_per_node=world_size,
            accelerator="cpu",
            seed=1,
            tracking=Tracking(uri="sqlite://", experiment="sgpu"),
            python=sys.executable,
            working_dir=".",
        ).write(self.dir)
        this_process().write(self.dir.agent)

    def event(self, kind: str, *, after_seconds: float = 0.0, **facts: Any) -> None:
        record = {"time": self.created + after_seconds, "kind": kind, "generation": 0, "rank": None, **facts}
        records.append(self.dir.events, record)

    def metrics(self, step: int, *, rank: int = 0, generation: int = 0, **values: Any) -> None:
        line = {"time": self.created + step, "step": step, "generation": generation, "values": values}
        with self.dir.spool(rank).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def log(self, content: bytes, *, rank: int = 0, generation: int = 0) -> pathlib.Path:
        path = self.dir.log(generation, rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(content)
        return path

    def status(self, state: str, **facts: Any) -> None:
        Status(state=state, updated=self.created + 60, started=self.created, **facts).write(self.dir)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def run(tmp_path: pathlib.Path, clock: FakeClock) -> HandMadeRun:
    """A run of two CPU workers that was just started."""
    return HandMadeRun(tmp_path / "20261130-train", world_size=2, name="train", created=clock.wall())


@pytest.fixture
def hostile(tmp_path: pathlib.Path, clock: FakeClock) -> HandMadeRun:
    """One whose name is markup."""
    return HandMadeRun(
        tmp_path / "hostile", world_size=1, name="<script>alert(1)</script>\x1b[31m", created=clock.wall()
    )


@pytest.fixture
def growing() -> types.ModuleType:
    """The script that writes a run as it would grow, as a module."""
    return _script("growing_run")


@pytest.fixture
def shelves() -> types.ModuleType:
    """The script that makes roots of checkpoints, as a module."""
    return _script("shelves")


@pytest.fixture
def root(tmp_path: pathlib.Path, shelves: Any) -> pathlib.Path:
    """Checkpoints of steps 10 to 50, one of which lost a byte."""
    folder = tmp_path / "root"
    shelves.many(folder, 5)
    shard = folder / "step-00000030" / shelves.SHARD
    shard.write_bytes(shard.read_bytes()[:-1])
    return folder


@pytest.fixture
def opened_shelf() -> Callable[[Any], Shelf]:
    """Lists the checkpoints of a root or a run."""

    def shelf_of(root: Any) -> Shelf:
        shelf = Shelf(find_place(root))
        shelf.refresh()
        return shelf

    return shelf_of


def _script(name: str) -> types.ModuleType:
    """A script beside this file."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
