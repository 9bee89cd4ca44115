"""A tracking server that is a file of the run folder: the forwarder is the product's, and no MLflow is loaded."""

from __future__ import annotations

import json
import pathlib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import Tracking
from sgpu.metrics.progress import Point
from sgpu.metrics.writer import Link


def tracked(run: RunDir) -> pathlib.Path:
    return run.metrics / "tracked.jsonl"


class MlflowWriter:
    """As the product's: its metrics lie in `tracked`."""

    def __init__(
        self, run: RunDir, tracking: Tracking, *, name: str, created_seconds: float, parameters: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._run, self._file = run, tracked(run)
        self._link = Link(run_id=run.id, experiment_id="0", tracking_uri=tracking.uri, url=None, open_command=None)

    def open(self) -> Link:
        self._link.write(self._run)
        return self._link

    def marks(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for key, step in points(self._run):
            found[key] = max(step, found.get(key, step))
        return found

    def log(self, points: Sequence[Point]) -> None:
        with self._file.open("a") as file:
            file.write("".join(json.dumps([point.key, point.step, point.value]) + "\n" for point in points))

    def finish(self, status: str, *, ended_seconds: float, tags: Mapping[str, str]) -> None:
        return

    def save_text(self, name: str, text: str) -> None:
        return


def points(run: RunDir) -> list[tuple[str, int]]:
    """Name and step of each value that was tracked, in order."""
    if not tracked(run).exists():
        return []
    return [(key, step) for key, step, _ in map(json.loads, tracked(run).read_text().splitlines())]


def install() -> None:
    """In the process that forwarders are forked from."""
    module = types.ModuleType("sgpu.metrics.mlflow_writer")
    module.MlflowWriter = MlflowWriter  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
