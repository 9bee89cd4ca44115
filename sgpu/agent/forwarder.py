"""Keeps the process that writes metrics to MLflow; whatever becomes of it, the run goes on."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping

from sgpu.contract.events import emit
from sgpu.contract.forwarding import NO_MLFLOW, command
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import read_status

_QUICK_ENDS = 3  # so many in a row, and it is not started again
_QUICK_SECONDS = 60.0


class Forwarder:
    """Starts it, and again where it ended before the run did: it goes on where it was. A thread waits for it."""

    def __init__(self, run: RunDir, *, python: str, environment: Mapping[str, str]) -> None:
        self._run = run
        self._command = command(run.root, python=python)
        # By the folder, what is left of it is found where the agent was killed: see leftovers.py.
        self._environment = {**environment, "SGPU_RUN_DIR": str(run.root)}
        self._process: subprocess.Popen[bytes] | None = None
        self._code: int | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._keeper: threading.Thread | None = None

    def keep_running(self) -> None:
        """Starts it; to be called once."""
        self._process = self._start()
        self._keeper = threading.Thread(target=self._keep, args=(self._process,), name="sgpu-forwarder", daemon=True)
        self._keeper.start()

    def pids(self) -> list[int]:
        return [self._process.pid] if self._process is not None else []

    def finish(self, seconds: float, *, generation: int) -> None:
        """Waits until all is written, `seconds` at most."""
        if self._keeper is None or self._process is None:
            return
        self._keeper.join(seconds)
        in_time = not self._keeper.is_alive()
        if not in_time:
            with self._lock:
                self._given_up = True
                self._process.kill()
            self._keeper.join()
        if not in_time or self._code not in (0, NO_MLFLOW):  # that, it has told itself
            cause = f"ended with exit status {self._code}" if in_time else f"was not done after {seconds:g} s"
            self._warn(f"the metrics forwarder {cause}; see {self._run.forwarder_log}", generation)

    def _start(self) -> subprocess.Popen[bytes]:
        with self._run.forwarder_log.open("ab") as log:
            return subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def _keep(self, process: subprocess.Popen[bytes]) -> None:
        quick_ends = 0
        while True:
            started = time.monotonic()
            self._code = process.wait()
            quick_ends = quick_ends + 1 if time.monotonic() - started < _QUICK_SECONDS else 1
            with self._lock:
                if self._given_up or self._has_done_its_work() or quick_ends >= _QUICK_ENDS:
                    return
                process = self._process = self._start()
            self._warn(
                f"the metrics forwarder ended with exit status {self._code} and was started again; "
                f"see {self._run.forwarder_log}",
                max(self._run.generations(), default=0),
            )

    def _has_done_its_work(self) -> bool:
        """It ends by itself, with 0 or 1, once the run has ended; never by a signal, nor before, except for ever."""
        status = read_status(self._run)
        return self._code == NO_MLFLOW or (self._code in (0, 1) and status is not None and status.final)

    def _warn(self, message: str, generation: int) -> None:
        emit(self._run, "warning", generation=generation, message=message)
