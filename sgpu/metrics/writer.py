"""What the forwarder asks of a tracking server, and how that can fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from sgpu.contract import atomic
from sgpu.contract.errors import SgpuError
from sgpu.contract.rundir import RunDir
from sgpu.metrics.progress import Point

BATCH_POINTS = 1000
RunStatus = Literal["FINISHED", "FAILED", "KILLED"]


class TrackingDownError(SgpuError):
    """The server cannot be reached or is not well; the same call may work later."""


class TrackingRefusedError(SgpuError):
    """The server will never take this call. Facts: `code`; `gone`: the run itself is no more."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """Where MLflow keeps the run.

    Attributes:
        url: its page; None where the store has no server.
        open_command: what to type to see it where there is no url.
    """

    run_id: str
    experiment_id: str
    tracking_uri: str
    url: str | None
    open_command: str | None

    def write(self, run: RunDir) -> None:
        atomic.write_json(run.mlflow, asdict(self))


def read_link(run: RunDir) -> Link | None:
    """None before the forwarder has made the MLflow run."""
    value: Any = atomic.read_json(run.mlflow)
    return Link(**value) if value is not None else None


class Writer(Protocol):
    """One MLflow run. `open` first, `finish` last; each raises TrackingDownError or TrackingRefusedError."""

    def open(self) -> Link:
        """Continues the run of this sgpu run, or makes it; sets it running."""

    def marks(self) -> dict[str, int]:
        """The last step of each metric that the server has."""

    def log(self, points: Sequence[Point]) -> None:
        """At most BATCH_POINTS."""

    def finish(self, status: RunStatus, *, ended_seconds: float, tags: Mapping[str, str]) -> None:
        """Sets the final status; seconds since 1970."""

    def save_text(self, name: str, text: str) -> None:
        """Keeps a small text file with the run."""
