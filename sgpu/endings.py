"""How a run ended, as whoever waits for it gets it: each rank's value, or the exception that says why there is none."""

from __future__ import annotations

import pathlib
import pickle
import re
import shutil
from typing import Any

from sgpu.contract.errors import (
    AgentLostError,
    CrashLoopError,
    HangError,
    RemoteTraceback,
    ResultError,
    RunCancelledError,
    RunError,
    UserCodeError,
    WorkerLostError,
)
from sgpu.contract.outcome import read_outcome
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import Status

_FULL = ("No space left on device", "Disk quota exceeded")
_FULL_BYTES = 1_000_000
_ERROR = re.compile(r"[\w.]+(Error|Exception|Interrupt|Exit)\b")  # a traceback's last line
_TAIL_BYTES, _LONGEST = 65536, 300


def result_of(run: RunDir, generation: int, rank: int) -> Any:
    """What a rank returned.

    Raises:
        ResultError: it left nothing, or what it left cannot be read here.
    """
    outcome = read_outcome(run, generation, rank)
    if outcome is None or outcome.kind != "result":
        raise ResultError(f"rank {rank} of run {run.id} left no result", run_id=run.id, rank=rank)
    if outcome.result is None:
        raise ResultError(
            f"the return value of rank {rank} could not be brought back: {outcome.result_problem}. The run itself "
            f"succeeded ({run.root}); return plain values, or save to a file and return its path.",
            run_id=run.id,
            rank=rank,
        )
    try:
        return pickle.loads(outcome.result)
    except Exception as error:
        raise ResultError(
            f"the return value of rank {rank} cannot be read here: {type(error).__name__}: {error}. The run itself "
            f"succeeded ({run.root}); import in the notebook what the value is made of, or return plain values.",
            run_id=run.id,
            rank=rank,
        ) from error


def error_of(run: RunDir, status: Status) -> BaseException:
    """The exception for a run that ended without success; it is not raised."""
    failure = status.failure or {}
    facts = {"run_id": run.id, "rank": failure.get("rank"), "step": failure.get("step")}
    if status.state in ("CANCELLED", "PREEMPTED"):
        did = "was cancelled" if status.state == "CANCELLED" else "was preempted"
        return RunCancelledError(f"run {run.id} {did} after step {status.step}; go on with run.resume()", **facts)
    if status.state == "LOST":
        return AgentLostError(
            f"the supervisor of run {run.id} vanished after step {status.step}; {why_lost(run)}; "
            "go on with run.resume()",
            **facts,
        )
    error = _root_error(run, failure, facts)
    if failure.get("error") == "crash_loop":
        loop = CrashLoopError(
            f"run {run.id} ended after {failure['attempts']} attempts: {failure['reason']}: {failure['cause']}: "
            f"{failure['message']}",
            attempts=failure["attempts"],
            **facts,
        )
        loop.__cause__ = error
        return loop
    return error


def why_lost(run: RunDir) -> str:
    """What is known of the end of a run's supervisor, and where to look or what to do first."""
    last = _last_line(run.agent_log)
    free_bytes = shutil.disk_usage(run.root).free
    if free_bytes < _FULL_BYTES or any(mark in last for mark in _FULL):
        return (
            f"the disk of {run.root} was full, and {free_bytes / 1e6:.0f} MB are free there now: make room before it "
            f"goes on, or set SGPU_HOME to a folder elsewhere for new runs; its log: {run.agent_log}"
        )
    if _ERROR.match(last):
        return f"its log, {run.agent_log}, ends with {last[:_LONGEST]!r}"
    return f"see {run.agent_log}"


def _last_line(log: pathlib.Path) -> str:
    try:
        lines = log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    return next((line for line in reversed(lines) if line.strip()), "")


def _root_error(run: RunDir, failure: dict[str, Any], facts: dict[str, Any]) -> BaseException:
    message, kind = failure.get("message") or "", failure.get("kind")
    if kind == "hang":
        return HangError(message, **facts)
    if kind in ("exit", "signal"):
        log = run.log(failure["generation"], failure["rank"])
        return WorkerLostError(f"{message}; its log: {log}", cause=failure["cause"], **facts)
    if kind != "exception":
        return RunError(f"{message} (run {run.id}, {run.root})", **facts)
    error: BaseException | None = None
    outcome = read_outcome(run, failure["generation"], failure["rank"])
    if outcome is not None and outcome.exception is not None:
        try:
            error = pickle.loads(outcome.exception)
        except Exception:  # noqa: BLE001 - an exception of a class that this process does not have: as text instead
            error = None
    if error is None:
        error = UserCodeError(f"{failure['cause']}: {message}", **facts)
    error.__cause__ = RemoteTraceback(f"rank {failure['rank']}, step {failure['step']}:\n{failure['traceback']}")
    return error
