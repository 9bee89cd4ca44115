"""Runs end their result before their agent: it still brings the last metrics to MLflow."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator

import pytest

from sgpu.contract import process
from sgpu.contract.rundir import all_runs


@pytest.fixture(autouse=True)
def agents_end(home: pathlib.Path, no_process_left: None) -> Iterator[None]:
    """Waits for the agents of this test's runs."""
    yield
    deadline = time.monotonic() + 60
    for run in all_runs(home):
        agent = process.read_process(run.agent)
        while agent is not None and agent.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
