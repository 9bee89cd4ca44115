"""What a long run measured before the ends of its spools: from MLflow, once, in a thread of its own."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Mapping, Sequence

from sgpu.contract import atomic, records
from sgpu.contract.clock import Clock, SystemClock
from sgpu.contract.rundir import RunDir
from sgpu.metrics import mlflow_reader
from sgpu.metrics.mlflow_reader import MetricPoint
from sgpu.widgets.words import whole

LONG_BYTES = 8 * 2**20  # of one rank's spool: some seconds of reading
TAIL_BYTES = 2**20
CUT_STEPS = 1000  # a spool that begins later was cut at its front, or its run began at a checkpoint
PATIENCE_SECONDS = 10.0
_MOST_POINTS = 1000
_WAIT_SECONDS = 0.05
Found = Mapping[str, Sequence[MetricPoint]]


class Past:
    """`ask` once, then `take` until it gives something."""

    def __init__(self, run: RunDir, *, clock: Clock | None = None) -> None:
        self._run = run
        self._clock = clock or SystemClock()
        self._found: Found = {}
        self._done = threading.Event()
        self._asked_at = 0.0

    def ask(self) -> bool:
        """Whether there is an MLflow run to ask."""
        facts = atomic.read_json(self._run.mlflow)
        if not isinstance(facts, dict) or not facts.get("run_id") or not facts.get("tracking_uri"):
            return False
        self._asked_at = self._clock.monotonic()
        asked = (str(facts["tracking_uri"]), str(facts["run_id"]))
        threading.Thread(target=self._read, args=asked, name="sgpu-past", daemon=True).start()
        return True

    def take(self) -> Found | None:
        """None while it is not there yet; nothing in it where MLflow did not answer in time."""
        if self._done.wait(_WAIT_SECONDS):
            return self._found
        return {} if self._clock.monotonic() - self._asked_at > PATIENCE_SECONDS else None

    def _read(self, tracking_uri: str, run_id: str) -> None:
        try:
            self._found = mlflow_reader.histories(tracking_uri, run_id, most_points=_MOST_POINTS)
        except Exception:  # noqa: BLE001 - the spools are read instead, whatever a server or its package answers
            self._found = {}
        finally:
            self._done.set()


def tail_offset(path: pathlib.Path, long_bytes: int, tail_bytes: int) -> int:
    """Where the last lines of a long file begin; 0 of one that is not long."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size <= long_bytes:
                return 0
            file.seek(size - tail_bytes)
            file.readline()
            return file.tell()
    except FileNotFoundError:
        return 0


def first_step(path: pathlib.Path) -> int:
    """Of a spool's first line; 0 where there is none."""
    line = next(iter(records.read_from(path)), None)
    return (whole(line.record.get("step")) or 0) if line is not None else 0
