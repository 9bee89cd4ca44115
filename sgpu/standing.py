"""Where a run stands, from its folder alone; waiting for its end, and asking for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from sgpu.contract import process
from sgpu.contract.errors import InputError, RunError
from sgpu.contract.heartbeat import Page
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import read_spec
from sgpu.contract.status import Status, read_status

_LOOK_SECONDS = 0.05
_START_SECONDS = 10.0
_CANCEL_SECONDS = 30.0
_DELIVERY_SECONDS = 15.0
_DELIVERY_AFTER_FAILURE_SECONDS = 5.0  # whoever waits for an error, or has cancelled, waits for nothing else


def status_of(run: RunDir) -> Status:
    """Where the run stands. A run whose supervisor vanished is LOST, whatever it wrote last."""
    status = read_status(run) or _starting(run)
    if status.final or has_agent(run):
        return status
    status = read_status(run) or status  # it may have ended in between
    was_there = run.agent.exists()  # else it may still be waiting for a machine
    if not status.final and (was_there or time.time() - read_spec(run).created > _START_SECONDS):
        return replace(status, state="LOST", step=_last_step(run, status))
    return status


def has_agent(run: RunDir) -> bool:
    """Whether the process that supervises it is there."""
    agent = process.read_process(run.agent)
    return agent is not None and agent.alive()


def _is_mine(run: RunDir) -> bool:
    return process.read_process(run.agent) == process.this_process()


def wait(run: RunDir, timeout_seconds: float | None = None, *, each_turn: Callable[[], object] | None = None) -> str:
    """As `Run.wait`."""
    if timeout_seconds is None and _is_mine(run) and not status_of(run).final:
        raise InputError(
            f"run {run.id} is this process' own training loop, which would wait for itself. Finish the loop, or "
            "wait with timeout_seconds."
        )
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        status = status_of(run)
        if status.final and not _delivering(run, status):
            return status.state
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(
                f"run {run.id} has not ended within {timeout_seconds:g} s (state {status.state}, step "
                f"{status.step}); it goes on: wait again, or cancel()"
            )
        if each_turn is not None:
            each_turn()
        time.sleep(_LOOK_SECONDS)


def cancel(run: RunDir) -> None:
    """As `Run.cancel`."""
    if status_of(run).final:
        return
    run.cancel.touch(mode=0o600)
    try:
        wait(run, _CANCEL_SECONDS)
    except TimeoutError:
        raise RunError(
            f"run {run.id} is still ending after {_CANCEL_SECONDS:g} s; see {run.agent_log}", run_id=run.id
        ) from None


def _starting(run: RunDir) -> Status:
    created = read_spec(run).created
    return Status(state="STARTING", updated=created, started=created)


def _last_step(run: RunDir, status: Status) -> int:
    """The supervisor wrote its status now and then; the workers noted each step."""
    if not run.heartbeat.exists():
        return status.step
    page = Page(run.heartbeat)
    step = min(beat.step for beat in page.beats()[: status.world_size])
    page.close()
    return step


def _delivering(run: RunDir, status: Status) -> bool:
    """The workers are gone, and the agent still brings metrics to MLflow: worth a moment, not more."""
    most = _DELIVERY_SECONDS if status.state == "SUCCEEDED" else _DELIVERY_AFTER_FAILURE_SECONDS
    return has_agent(run) and time.time() - (status.ended or status.updated) < most
