"""What a run measured before its spools begin, where these were cut: from MLflow, once, in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from sgpu.contract import atomic
from sgpu.contract.clock import Clock, SystemClock
from sgpu.contract.rundir import RunDir
from sgpu.metrics import mlflow_reader
from sgpu.metrics.mlflow_reader import MetricPoint

PATIENCE_SECONDS = 10.0
_MOST_POINTS = 1000
_WAIT_SECONDS = 0.05


class Past:
    """`ask` once, then `take` until `over`."""

    def __init__(self, run: RunDir, *, clock: Clock | None = None) -> None:
        self._run = run
        self._clock = clock or SystemClock()
        self._found: queue.SimpleQueue[tuple[str, Sequence[MetricPoint]] | None] = queue.SimpleQueue()
        self._heard_at = 0.0
        self.over = True

    def ask(self) -> bool:
        """Whether there is an MLflow run to ask."""
        facts = atomic.read_json(self._run.mlflow)
        if not isinstance(facts, dict) or not facts.get("run_id") or not facts.get("tracking_uri"):
            return False
        self._heard_at, self.over = self._clock.monotonic(), False
        asked = (str(facts["tracking_uri"]), str(facts["run_id"]))
        threading.Thread(target=self._read, args=asked, name="sgpu-past", daemon=True).start()
        return True

    def take(self) -> list[tuple[str, Sequence[MetricPoint]]]:
        """Metrics that have come since. None come any more once MLflow was silent for `PATIENCE_SECONDS`."""
        taken: list[tuple[str, Sequence[MetricPoint]]] = []
        try:
            while (one := self._found.get(timeout=_WAIT_SECONDS if not taken else 0)) is not None:
                self._heard_at = self._clock.monotonic()
                taken.append(one)
            self.over = True
        except queue.Empty:
            self.over = self._clock.monotonic() - self._heard_at > PATIENCE_SECONDS
        return taken

    def _read(self, tracking_uri: str, run_id: str) -> None:
        try:
            for one in mlflow_reader.histories(tracking_uri, run_id, most_points=_MOST_POINTS):
                self._found.put(one)
        except Exception:  # noqa: BLE001 - the view shows what it has, whatever a server or its package answers
            return
        finally:
            self._found.put(None)
