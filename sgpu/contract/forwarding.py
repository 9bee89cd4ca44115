"""How the process that brings a run's metrics to MLflow is started, and the one end of it that has a meaning."""

from __future__ import annotations

import os
import pathlib
import sys

NO_MLFLOW = 78  # sysexits.h: configuration. MLflow cannot be imported, so that there is no use in another start


def command(run_root: pathlib.Path, *, python: str = sys.executable, parent_pid: int | None = None) -> list[str]:
    """What to start beside a run whose spec.json is written and whose status.json is not final.

    Args:
        parent_pid: whose end means that the supervisor vanished; None: the calling process.
    """
    parent = os.getpid() if parent_pid is None else parent_pid
    return [python, "-m", "sgpu.metrics.forwarder", str(run_root), "--parent-pid", str(parent)]
