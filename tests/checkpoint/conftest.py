"""What the checkpoint tests share: processes started from script text, and a small training state."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from sgpu.contract import failpoint
from sgpu.contract import process as process_contract

REPOSITORY = pathlib.Path(__file__).parents[2]
_told = importlib.util.spec_from_file_location("checkpoint_servers", pathlib.Path(__file__).with_name("servers.py"))
assert _told is not None
assert _told.loader is not None
servers = sys.modules[_told.name] = importlib.util.module_from_spec(_told)
_told.loader.exec_module(servers)
# Fixtures, which pytest looks for here.
free_port = servers.free_port
s3_server, azure_server, gcs_server = servers.s3_server, servers.azure_server, servers.gcs_server
s3, azure, gcs = servers.s3, servers.azure, servers.gcs


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    out: str
    err: str


class Warm:
    """A script in a process of its own, forked from one that has imported torch already."""

    def __init__(self, name: str, script: pathlib.Path, environment: dict[str, str], output: pathlib.Path) -> None:
        self._out, self._err = output.with_suffix(f"{output.suffix}.out"), output.with_suffix(f"{output.suffix}.err")
        self._code: int | None = None
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(f"\0{name}")
        asked = {"script": str(script), "environment": environment, "out": str(self._out), "err": str(self._err)}
        self._link.sendall(json.dumps(asked).encode() + b"\n")
        self._answers = self._link.makefile()
        self.pid = int(self._answers.readline())

    def ended(self, deadline: float) -> Ended:
        """Raises TimeoutError when it has not ended by then (monotonic seconds)."""
        self._link.settimeout(max(0.1, deadline - time.monotonic()))
        try:
            self._code = int(self._answers.readline())
        except TimeoutError:
            told = self._err.read_text(errors="replace")[-6000:]
            raise TimeoutError(f"process {self.pid} has not ended; it said:\n{told}") from None
        return Ended(code=self._code, out=self._out.read_text(), err=self._err.read_text(errors="replace"))

    def end(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._answers.close()
        self._link.close()


@pytest.fixture(scope="session")
def warm() -> Iterator[str]:
    """The name of the process that scripts are forked from; see warm.py."""
    name = f"sgpu-tests-{os.getpid()}-{time.monotonic_ns()}"
    environment = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
        "KEPT_FOR_THE_SESSION": "1",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "tests/checkpoint/warm.py"), name], env=environment, text=True,
        stdout=subprocess.PIPE, preexec_fn=functools.partial(process_contract.die_with_parent, os.getpid()),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield name
    process.kill()
    process.communicate()


@pytest.fixture
def run_ranks(tmp_path: pathlib.Path, warm: str) -> Callable[..., list[Ended]]:
    """Runs a script on `world` ranks of real processes that share a gloo group; `ROOT` is a folder of this test."""
    count = 0

    def run(script: str, world: int = 1, *, timeout_seconds: float = 90, **environment: str) -> list[Ended]:
        nonlocal count
        count += 1
        path = tmp_path / f"script{count}.py"
        head = (
            "import os, sys, pathlib, torch\n"
            "torch.set_num_threads(1)\n"
            "rank, world = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
            "ROOT = os.environ['ROOT']\n"
            "if world > 1:\n"
            "    import torch.distributed as dist\n"
            "    meet = 'file://' + os.environ['MEET']\n"
            "    dist.init_process_group('gloo', init_method=meet, rank=rank, world_size=world)\n"
            "from sgpu.checkpoint import *\n"
        )
        path.write_text(head + textwrap.dedent(script))
        started = []
        for rank in range(world):
            inherited = {**os.environ, "PYTHONPATH": str(REPOSITORY), "RANK": str(rank), "WORLD_SIZE": str(world),
                         "ROOT": str(tmp_path / "root"), "MEET": str(tmp_path / f"meet{count}"),
                         "PYTHONWARNINGS": "ignore", **environment}  # fmt: skip
            started.append(Warm(warm, path, inherited, tmp_path / f"script{count}.{rank}"))
        deadline = time.monotonic() + timeout_seconds
        try:
            return [process.ended(deadline) for process in started]
        finally:
            for process in started:
                process.end()

    return run


@pytest.fixture
def run_ok(run_ranks: Callable[..., list[Ended]]) -> Callable[..., list[str]]:
    """As `run_ranks`, for scripts that must succeed; gives their outputs."""

    def run(script: str, world: int = 1, **named: str) -> list[str]:
        ended = run_ranks(script, world, **named)
        for rank, one in enumerate(ended):
            assert one.code == 0, f"rank {rank} ended with {one.code}:\n{one.out}\n{one.err[-6000:]}"
        return [one.out for one in ended]

    return run


@pytest.fixture
def helper(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """As an agent starts it, for two ranks; this process and what it starts find it."""
    name = f"sgpu-{process_contract.this_process().pid}-{time.monotonic_ns()}"
    process = subprocess.Popen(
        [sys.executable, "-m", "sgpu.checkpoint.helper", "--name", name, "--ranks", "2"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "SGPU_FAILPOINT_LOG": str(tmp_path / "fired.log")},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    monkeypatch.setenv("SGPU_CHECKPOINT_HELPER", name)
    yield process
    process.stdin.close()
    process.stdout.close()
    assert process.wait(60) in (0, -9)


@pytest.fixture
def arm(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Arms a failpoint in this process and its helpers; gives a function that tells what fired."""
    log = tmp_path / "fired.log"

    def do(text: str) -> Callable[[], list[str]]:
        monkeypatch.setenv("SGPU_FAILPOINT", text)
        monkeypatch.setenv("SGPU_FAILPOINT_LOG", str(log))
        failpoint.reset()
        return lambda: log.read_text().splitlines() if log.exists() else []

    yield do
    monkeypatch.undo()
    failpoint.reset()
