"""What the checkpoint tests share: processes started from script text, and a small training state."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pytest

REPOSITORY = pathlib.Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture
def run_ranks(tmp_path: pathlib.Path) -> Callable[..., list[Ended]]:
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
            started.append(
                subprocess.Popen(
                    [sys.executable, str(path)],
                    env=inherited,
                    text=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        ended = []
        try:
            for process in started:
                out, err = process.communicate(timeout=timeout_seconds)
                ended.append(Ended(code=process.returncode, out=out, err=err))
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                if process.stdout is not None and not process.stdout.closed:
                    process.communicate()
        return ended

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
