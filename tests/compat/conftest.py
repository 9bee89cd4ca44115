"""Runs end their result before their agent: it still brings the last metrics to MLflow."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def agents_end(no_process_left: None) -> Iterator[None]:
    """Waits for the agents of this test's runs."""
    yield
    agents = [child for child in psutil.Process().children() if "sgpu.agent" in _command(child)]
    psutil.wait_procs(agents, timeout=60)


def _command(child: psutil.Process) -> list[str]:
    try:
        return child.cmdline()
    except psutil.NoSuchProcess:
        return []
