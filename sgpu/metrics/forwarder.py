"""The process that brings a run's metrics to MLflow: `python -m sgpu.metrics.forwarder RUN_DIR [--parent-pid N]`.

One beside each run's supervisor. It reads the run folder and writes MLflow; nothing in the run waits for it. It ends by
itself after the run has: once everything is delivered, or `--drain-seconds` after the end of the run at the latest, and
then tells what was lost. SIGTERM gives it 5 seconds. Its starter sends what it prints to metrics/forwarder.log.
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import os
import pathlib
import sys
from collections.abc import Sequence

from sgpu import settings
from sgpu.contract import events
from sgpu.contract.clock import SystemClock
from sgpu.contract.forwarding import NO_MLFLOW
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking, read_spec
from sgpu.metrics import facts, progress, store
from sgpu.metrics.delivery import count_undelivered
from sgpu.metrics.forwarding import Forwarder
from sgpu.metrics.ledger import PageReader
from sgpu.metrics.node import SAMPLE_SECONDS, watch_node
from sgpu.metrics.supervisor import DeadlinePassed, Parent, Signals

_DRAIN_SECONDS = 30.0
_END_SECONDS = 5.0
_LOCK_SECONDS = 60.0
_NICE = 10

_MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # trying again is this process's own work, with its deadline
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: MLflow has everything; 1: something was lost (told in events.jsonl), or another one is at work.

    `forwarding.NO_MLFLOW`: it cannot be imported, which is told there too.
    """
    parser = argparse.ArgumentParser(prog="python -m sgpu.metrics.forwarder")
    parser.add_argument("run_dir", type=pathlib.Path)
    parser.add_argument("--parent-pid", type=int, default=None)
    parser.add_argument("--drain-seconds", type=float, default=_DRAIN_SECONDS)
    parser.add_argument("--period-seconds", type=float, default=1.0)
    parser.add_argument("--sample-seconds", type=float, default=SAMPLE_SECONDS)
    told = parser.parse_args(arguments)
    run = RunDir(told.run_dir.absolute())
    spec = read_spec(run)
    signals, parent = Signals(end_seconds=_END_SECONDS), Parent(told.parent_pid)
    os.nice(_NICE)
    log = os.open(run.forwarder_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        _only_one(log, signals)
        return _make(run, spec, told, signals, parent).serve()
    except ImportError as problem:
        why = f"metrics stay in the run folder, {run.metrics}: MLflow cannot be imported ({problem})"
        events.emit(run, "warning", generation=0, message=why)
        return NO_MLFLOW
    except DeadlinePassed:
        signals.clear_deadline()
        count = count_undelivered(run, spec.world_size, progress.read(run))
        cause = "the forwarder was ended, or another one held this run, before it could connect to MLflow"
        events.emit(run, "metrics_lost", generation=0, count=count, cause=cause)
        return 1
    finally:
        parent.close()
        os.close(log)


def _only_one(log: int, signals: Signals) -> None:
    """One forwarder a run: the next waits for the one before, which is bounded."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        signals.set_deadline(_LOCK_SECONDS)
        fcntl.flock(log, fcntl.LOCK_EX)
        signals.clear_deadline()


def _make(run: RunDir, spec: RunSpec, told: argparse.Namespace, signals: Signals, parent: Parent) -> Forwarder:
    inherited = settings.inherited()
    settings.adopt({name: value for name, value in _MLFLOW_DEFAULTS.items() if name not in inherited})
    tracking = _tracking(spec)
    from sgpu.metrics.mlflow_writer import MlflowWriter  # seconds of imports: after the signals are ours

    writer = MlflowWriter(
        run,
        tracking,
        name=spec.name,
        created_seconds=spec.created,
        parameters=facts.parameters(spec),
        tags=facts.tags(run, spec),
    )
    sampler = watch_node(
        run, spec, 0, PageReader(run.heartbeat).beats, environment={**inherited, **spec.environment},
        period_seconds=told.sample_seconds,
    )  # fmt: skip
    return Forwarder(
        run,
        world_size=spec.world_size,
        writer=writer,
        sampler=sampler,
        parent=parent,
        signals=signals,
        clock=SystemClock(),
        drain_seconds=told.drain_seconds,
        period_seconds=told.period_seconds,
    )


def _tracking(spec: RunSpec) -> Tracking:
    """The same store as the notebook's: relative paths are its own. Works in the folder of a local store."""
    uri = store.absolute(spec.tracking.uri, pathlib.Path(spec.working_dir))
    file = store.sqlite_file(uri)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chdir(file.parent)  # mlflow notes ./mlruns of the working folder for its default experiment
    return dataclasses.replace(spec.tracking, uri=uri)


if __name__ == "__main__":
    sys.exit(main())
