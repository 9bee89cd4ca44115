"""Killed in the middle of an epoch and gone on with: what is trained twice or never, and how long a first batch takes.

Each rank is a process that keeps its loader's state after some batches, takes two more, and is killed (SIGKILL). New
ranks go on from the states to the end of the epoch. "duplicates" and "missing" are of the samples of that epoch; some
loaders repeat samples at its end by design, so that ranks are even. `seconds` is from making the loader to the first
new batch, imports not counted, one rank without workers; "constant" is that at the far batch over that at the near one.

SGPU_PEERS_PYTHON: an interpreter that has torch, sgpu's dependencies and the peers (torchdata, mosaicml-streaming,
litdata, accelerate); what it lacks is left out. `python -m tests.benchmarks.bench_resume_peers` prints Markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from tests.benchmarks.resume_peers import PEERS, Life

SAMPLES, STOP = 1003, 11
BEFORE = (2, 2)
AFTER = ((2, 2), (2, 3), (1, 2), (3, 1))
SECONDS = 900.0
_ROOT = pathlib.Path(__file__).parents[2]


def run(quick: bool) -> list[dict[str, Any]]:
    return measure(list(PEERS), far=2_000 if quick else 100_000)


def measure(names: list[str], *, far: int) -> list[dict[str, Any]]:
    """A row for each; `far`: batches before the second moment that is gone on from."""
    found = _ask({})
    told = next(line for line in found.splitlines() if line.startswith("VERSIONS "))
    installed: dict[str, str | None] = json.loads(told.removeprefix("VERSIONS "))
    rows: list[dict[str, Any]] = []
    for name in names:
        if installed[name] is None:
            rows.append({"loader": name, "version": "not installed"})
            continue
        row: dict[str, Any] = {"loader": name, "version": installed[name]}
        with tempfile.TemporaryDirectory(prefix="sgpu-peers-") as folder:
            row |= _exactness(name, folder)
        with tempfile.TemporaryDirectory(prefix="sgpu-peers-") as folder:
            try:
                row |= _seconds(name, folder, 100, far)
            except subprocess.TimeoutExpired:
                row["seconds near"] = f"its data were not written within {SECONDS:g} s"
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def _exactness(name: str, folder: str) -> dict[str, str]:
    """Duplicates / missing for each change of world and workers."""
    _ask({"prepare": name, "folder": folder, "samples": SAMPLES})
    world, workers = BEFORE
    life = Life(
        peer=name, folder=folder, name="first", samples=SAMPLES, world=world, rank=0, workers=workers, stop=STOP
    )
    before, problem = _live(life)
    cells = {}
    for number, (world, workers) in enumerate(AFTER):
        after: list[int] | None = None
        if before is not None:
            next_life = dataclasses.replace(
                life, name=f"next{number}", world=world, workers=workers, stop=None, after="first", former=BEFORE[0]
            )
            after, problem = _live(next_life)
        if before is None or after is None:
            cells[f"{BEFORE}->{(world, workers)}"] = f"fails: {problem}"
            continue
        total = before + after
        cells[f"{BEFORE}->{(world, workers)}"] = f"{len(total) - len(set(total))} / {SAMPLES - len(set(total))}"
    return cells


def _seconds(name: str, folder: str, near: int, far: int) -> dict[str, float | str]:
    samples = (far + 100) * 16
    _ask({"prepare": name, "folder": folder, "samples": samples})
    taken: dict[int, float] = {}
    for at in (near, far):
        life = Life(
            peer=name, folder=folder, name=f"at{at}", samples=samples, world=1, rank=0, workers=0, stop=at
        )  # fmt: skip
        found, problem = _live(life)
        if found is None:
            return {**_told(taken, near), "constant": f"batch {at} is not reached: {problem}"}
        rounds = []
        for number in range(3):
            again = dataclasses.replace(life, name=f"from{at}.{number}", after=life.name, stop=1)
            found, problem = _live(again)
            if found is None:
                return {**_told(taken, near), "constant": f"fails: {problem}"}
            rounds.append(json.loads(again.path("seen").read_text())[0])
        taken[at] = sorted(rounds)[1]
    return {**_told(taken, near), "seconds far": taken[far], "constant": taken[far] / taken[near]}


def _told(taken: dict[int, float], near: int) -> dict[str, float | str]:
    return {"seconds near": taken[near]} if near in taken else {}


def _live(life: Life) -> tuple[list[int] | None, str]:
    """The samples of all ranks; or None, and why."""
    ranks = [dataclasses.replace(life, rank=rank) for rank in range(life.world)]
    _forget_shared_memory()
    processes = [_start(dataclasses.asdict(rank), rank) for rank in ranks]
    problem = ""
    for process in processes:
        try:
            _, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            problem = problem or "does not end"
        lines = [line for line in errors.splitlines() if line.strip()]
        if process.returncode not in (0, -9) and not problem:
            problem = lines[-1][:160] if lines else f"exit code {process.returncode}"
    if problem or not all(rank.path("seen").exists() for rank in ranks):
        return None, problem or "no batches"
    return [number for rank in ranks for number in json.loads(rank.path("seen").read_text())[1]], ""


def _forget_shared_memory() -> None:
    """MosaicML Streaming leaves names behind when it is killed, and fails over them later."""
    for path in pathlib.Path("/dev/shm").glob("[0-9][0-9][0-9][0-9][0-9][0-9]_*"):
        path.unlink(missing_ok=True)


def _python() -> str:
    return os.environ.get("SGPU_PEERS_PYTHON", sys.executable)


def _start(told: dict[str, Any], life: Life | None) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "LITDATA_DISABLE_VERSION_CHECK": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
    if life is not None:
        environment |= {
            "RANK": str(life.rank), "WORLD_SIZE": str(life.world), "LOCAL_RANK": str(life.rank),
            "LOCAL_WORLD_SIZE": str(life.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29713",
        }  # fmt: skip
    return subprocess.Popen(
        [_python(), "-m", "tests.benchmarks.resume_peers", json.dumps(told)], cwd=_ROOT, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def _ask(told: dict[str, Any]) -> str:
    process = _start(told, None)
    try:
        answer, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{told} ended with {process.returncode}:\n{errors[-2000:]}")
    return answer


def markdown(rows: list[dict[str, Any]]) -> str:
    """The rows as a table for docs/."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        lines.append(
            "| " + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells) + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prints Markdown.")
    parser.add_argument("names", nargs="*", metavar="loader", help=f"of {', '.join(PEERS)}; none: all")
    parser.add_argument("--far", type=int, default=100_000, help="batches before the far moment")
    asked = parser.parse_args()
    print(markdown(measure(asked.names or list(PEERS), far=asked.far)))
