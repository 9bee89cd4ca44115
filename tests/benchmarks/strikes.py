"""Faults that a benchmark plans in a job's folder, and that the job meets by itself: the same for whoever runs it."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import select
import signal
import time
from collections.abc import Callable
from typing import Any


class StruckError(RuntimeError):
    """What the fault "exception" raises."""


def _raise() -> None:
    raise StruckError("struck by the benchmark")


def _spin() -> None:
    while True:
        pass


def _hold() -> None:
    """A deadlock in C. A `sleep` would be over with the first signal, as that which asks for stacks."""
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)


FAULTS: dict[str, tuple[int, Callable[[], Any]]] = {
    "exception": (1, _raise),
    "SIGKILL": (1, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "SIGKILL of rank 0": (0, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "Python loop": (1, _spin),
    "blocking call": (1, lambda: select.select([], [], [])),
    "held GIL": (1, _hold),
    "SIGSTOP": (1, lambda: os.kill(os.getpid(), signal.SIGSTOP)),
}
"""By name: the rank that does it to itself, and how."""
HANGS = ("Python loop", "blocking call", "held GIL", "SIGSTOP")


def plan(folder: str, fault: str, *, step: int, number: int = 0) -> None:
    """The fault's rank meets it once, as soon as it has completed `step`."""
    path = pathlib.Path(folder, f"strike{number}.json")
    path.with_suffix(".tmp").write_text(json.dumps({"fault": fault, "rank": FAULTS[fault][0], "step": step}))
    path.with_suffix(".tmp").replace(path)


def meet(folder: str, rank: int, step: int) -> None:
    """To be called after each step, by every rank. Faults come in the order of their numbers."""
    waiting = list(pathlib.Path(folder).glob("strike*.json"))
    if not waiting:
        return
    path = min(waiting, key=lambda path: int(path.stem.removeprefix("strike")))
    try:
        planned = json.loads(path.read_text())
    except FileNotFoundError:
        return  # another rank has just met it
    if planned["rank"] == rank and step >= planned["step"]:
        told = path.with_suffix(".told")
        told.write_text(json.dumps({"time": time.time(), "rank": rank, "step": step}))
        path.rename(path.with_suffix(".fired"))
        FAULTS[planned["fault"]][1]()


def fired(folder: str) -> list[dict[str, Any]]:
    """Time, rank and step of each fault that happened, oldest first."""
    found = [path.with_suffix(".told") for path in pathlib.Path(folder).glob("strike*.fired")]
    return sorted((json.loads(path.read_text()) for path in found), key=lambda told: told["time"])
