"""Keeps the process that finishes this node's checkpoints: what workers have staged outlives them in its memory."""

from __future__ import annotations

import math
import pathlib
import subprocess
import threading
import time
from collections.abc import Mapping

from sgpu.agent.judging import kernel_view
from sgpu.checkpoint.helper.asking import answers
from sgpu.contract.events import emit
from sgpu.contract.process import this_process
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec

_QUICK_ENDS = 3  # so many in a row are replaced
_QUICK_SECONDS = 60.0
_MOST_SILENT_SECONDS = 60.0
_ASKED_AGAIN = 5  # times, while it has to wait for a core: it is of lower priority than what trains here


class CheckpointHelper:
    """Order of calls: open; then workers may be started with `name` in their environment; close after they are gone."""

    def __init__(
        self, run: RunDir, spec: RunSpec, *, node: int, address: str, log: pathlib.Path, environment: Mapping[str, str]
    ) -> None:
        me, ranks = this_process(), spec.ranks_of(node)
        self.name = f"sgpu-{me.pid}-{me.started}-checkpoints"
        self._run = run
        self._log = log
        self._command = [
            spec.python, "-m", "sgpu.checkpoint.helper", "--name", self.name, "--first-rank", str(ranks.start),
            "--ranks", str(len(ranks)), "--node", str(node), "--nodes", str(spec.nodes), "--address", address,
            "--peers", str(run.peers),
        ]  # fmt: skip
        self._environment = {**environment, "SGPU_RUN_DIR": str(run.root)}
        # Before a rank that waits for it is taken for hung.
        self._silent_seconds = min(_MOST_SILENT_SECONDS, (spec.restarts.hang_seconds or math.inf) / 3)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = False
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def open(self) -> None:
        """Returns at once; a worker that comes before it is ready starts a helper of its own."""
        self._start()
        self._watcher.start()

    def _start(self) -> None:
        with self._lock, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, env=self._environment
            )

    def _watch(self) -> None:
        """One that died, or hangs, is replaced, unless that happens again and again; then workers start their own."""
        quick_ends = 0
        while self._process is not None:
            started = time.monotonic()
            what = self._end_of(self._process)
            if self._process.stdin is not None:
                self._process.stdin.close()
            if self._closing:
                return
            quick_ends = quick_ends + 1 if time.monotonic() - started < _QUICK_SECONDS else 1
            again = quick_ends <= _QUICK_ENDS
            then = "another is started" if again else "that happened too often: each worker starts one of its own"
            message = f"the process that finishes checkpoints {what}; {then}"
            emit(self._run, "warning", generation=0, message=message)
            if not again:
                return
            self._start()

    def _end_of(self, process: subprocess.Popen[bytes]) -> str:
        """Waits for it; one that hangs is ended."""
        while True:
            try:
                return f"ended with exit status {process.wait(self._silent_seconds / 2)}"
            except subprocess.TimeoutExpired:
                if self._answers(process.pid):
                    continue
            process.kill()
            process.wait()
            return f"did not answer within {self._silent_seconds:g} s and was ended"

    def _answers(self, pid: int) -> bool:
        for _ in range(1 + _ASKED_AGAIN):
            before = kernel_view.look(pid) or ""
            if answers(self.name, self._silent_seconds):
                return True
            view = kernel_view.parse(before + (kernel_view.look(pid) or ""))
            if view is None or not view.starved:
                return False
        return False

    def pids(self) -> list[int]:
        with self._lock:  # not between its start and its being known
            return [self._process.pid] if self._process is not None else []

    def close(self, seconds: float) -> None:
        """Waits until what was staged is committed or cannot be, `seconds` at most."""
        self._closing = True
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._watcher.join()
