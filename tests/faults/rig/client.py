"""Cells from the side of a test: one warm process for all of them, several cells at a time."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

REPOSITORY = pathlib.Path(__file__).parents[3]


class Warm:
    """Order of calls: `start` as often as wished, `close`."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.rig.server"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment, "KEPT_FOR_THE_SESSION": "1"}, cwd=REPOSITORY,
        )  # fmt: skip
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            raise RuntimeError("the process that cells are forked from did not start")
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future[dict[str, Any]], pathlib.Path]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(
        self, function: str, folder: pathlib.Path, arguments: Mapping[str, Any], *, part: str = "cell",
        limit_seconds: int = 150,
    ) -> Future[dict[str, Any]]:  # fmt: skip
        """Calls `function(folder, **arguments)` of a part of the rig in a fork; the folder is made.

        Returns:
            A future of what it returns.
        """
        folder.mkdir(parents=True)
        future: Future[dict[str, Any]] = Future()
        assert self._process.stdin is not None
        with self._lock:
            number = len(self._waiting)
            self._waiting[number] = future, folder
            asked = {
                "module": f"tests.faults.rig.{part}", "function": function, "arguments": dict(arguments),
                "folder": str(folder), "number": number, "limit_seconds": limit_seconds,
            }  # fmt: skip
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        return future

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(30)
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            future, folder = self._waiting[told["number"]]
            if told["code"] == 0:
                future.set_result(json.loads((folder / "result.json").read_text()))
            else:
                log = (folder / "log").read_text(errors="replace")
                future.set_exception(RuntimeError(f"{folder} ended with {told['code']}:\n{log[-6000:]}"))
        for future, folder in self._waiting.values():
            if not future.done():
                future.set_exception(RuntimeError(f"{folder}: the process that cells are forked from has ended"))
