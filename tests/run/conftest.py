"""Real runs: what ends with a test, and what an interpreter beside it does."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import sgpu
from sgpu import Run
from sgpu.contract import process


@pytest.fixture(autouse=True)
def each_is_without_mlflow(without_mlflow: None) -> None:
    """What that fixture does, for every test here."""


@pytest.fixture(autouse=True)
def nothing_runs_on(home: pathlib.Path) -> Iterator[None]:
    """Ends what a failed test left of its runs; whether that was right, the test itself asserts."""
    yield
    for run in sgpu.runs():
        agent = process.read_process(pathlib.Path(run.path) / "agent.json")
        if agent is not None:
            agent.signal(signal.SIGKILL)
    sgpu.cleanup()


@pytest.fixture
def until() -> Callable[..., Any]:
    """Waits for a condition, with a deadline; its value."""

    def wait(condition: Callable[[], Any], what: str = "the condition", seconds: float = 60.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < deadline, f"{what} did not come true within {seconds:g} s"
            time.sleep(0.02)
        return value

    return wait


@pytest.fixture
def members() -> Callable[[Run], list[int]]:
    """Living processes that belong to a run: they carry its folder in their environment or command."""

    def find(run: Run) -> list[int]:
        found = []
        for candidate in psutil.process_iter():
            try:
                told = [*candidate.cmdline(), candidate.environ().get("SGPU_RUN_DIR", "")]
                if candidate.pid != os.getpid() and run.path in told and candidate.status() != psutil.STATUS_ZOMBIE:
                    found.append(candidate.pid)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    return find


@pytest.fixture
def left(members: Callable[[Run], list[int]]) -> Callable[[Run], list[int]]:
    """Processes that outlive a run. It is told as ended while its agents still close what they have in hand."""

    def find(run: Run) -> list[int]:
        deadline = time.monotonic() + 30
        while (found := members(run)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    return find


@pytest.fixture
def script(tmp_path: pathlib.Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a Python script of its own in a folder of its own, as a kernel would be."""
    started: list[subprocess.Popen[str]] = []

    def start(text: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        folder = tmp_path / "notebook"
        folder.mkdir(exist_ok=True)
        file = folder / f"script{len(started)}.py"
        file.write_text(text)
        child = subprocess.Popen(
            [sys.executable, str(file), *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env={**os.environ, **environment},
        )  # fmt: skip
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


@pytest.fixture
def seconds_to_end() -> Callable[[Run], float]:
    """From the (last) start of the workers to the end of the run, by the run's own clock."""

    def measure(run: Run) -> float:
        events = run.events()
        started = [event["time"] for event in events if event["kind"] == "generation_started"]
        return float(events[-1]["time"] - started[0])

    return measure
