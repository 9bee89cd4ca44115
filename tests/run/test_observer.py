"""Metrics that cannot be delivered hold up nobody."""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import time
from collections.abc import Callable

import pytest

from sgpu import Run, distributed
from sgpu.contract.process import read_process


@pytest.mark.slow
def test_a_tracking_server_that_hangs_does_not_hold_the_result(
    monkeypatch: pytest.MonkeyPatch, members: Callable[[Run], list[int]]
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    with socket.socket() as silent:  # takes connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")

        @distributed(gpus=2)
        def fails() -> None:
            raise ValueError("the user's own error")

        run = fails.submit()
        with pytest.raises(ValueError, match="the user's own error"):
            run.result(100)
        waited = time.time() - run.events()[-1]["time"]
        assert waited < 14, f"the error was shown {waited:.1f} s after the end"
        agent = read_process(pathlib.Path(run.path) / "agent.json")
        assert agent is not None
        assert agent.alive(), "nothing was held back: this test shows nothing"
        assert run.state == "FAILED"
        run.cancel()
        rest = members(run)
        assert agent.pid in rest
        assert len(rest) == 2, "the agent and the process that still tries; no worker"
        for pid in rest:
            os.kill(pid, signal.SIGKILL)
