"""Keeps the process that writes metrics to MLflow; whatever becomes of it, the run goes on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

from sgpu.contract.events import emit
from sgpu.contract.rundir import RunDir

_STARTS = 3


class Forwarder:
    def __init__(self, run: RunDir, *, python: str, environment: Mapping[str, str]) -> None:
        self._run = run
        self._command = [
            python, "-m", "sgpu.metrics.forwarder", str(run.root), "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def keep_running(self) -> None:
        """Starts it, and again if it ended, a few times."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._starts >= _STARTS:
            return
        self._starts += 1
        with self._run.forwarder_log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def pids(self) -> list[int]:
        return [self._process.pid] if self._process is not None else []

    def finish(self, seconds: float, *, generation: int) -> None:
        """Waits until all is written, `seconds` at most."""
        if self._process is None:
            return
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        if code != 0:
            cause = f"ended with exit status {code}" if code is not None else f"was not done after {seconds:g} s"
            emit(
                self._run, "warning", generation=generation,
                message=f"the metrics forwarder {cause}; see {self._run.forwarder_log}",
            )  # fmt: skip
