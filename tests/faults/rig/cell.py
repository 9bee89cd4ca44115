"""One cell of the fault matrix: a run that is struck once, brought to its end, and looked at."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import select
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import sgpu
from sgpu import RestartPolicy, Run, distributed
from sgpu.contract import process
from sgpu.launch import code
from tests.faults.rig import faults, forking, job, oracles
from tests.faults.rig.cells import Cell
from tests.faults.rig.disk import Disk
from tests.faults.rig.planted import PLANTED

REPOSITORY = pathlib.Path(__file__).parents[3]
END_SECONDS = 60.0


def prepare(folder: pathlib.Path, *, failpoints: str = "", disk: Disk | None = None) -> None:
    """This process, and all below it, belong to a machine of their own: home, temporary files, clock and disk."""
    for name in ("home", "tmp", "notes", "second"):
        (folder / name).mkdir()
    job.make_volume(folder / "volume")
    for name in list(os.environ):
        if name.startswith(("SGPU_", "MLFLOW_")):
            del os.environ[name]
    os.environ.update({
        "SGPU_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(REPOSITORY),
        "SGPU_HEALTH": "off", "OMP_NUM_THREADS": "1", "SGPU_FAILPOINT_LOG": str(folder / "fired"),
        "SGPU_FAILPOINT": failpoints,
    })  # fmt: skip
    tempfile.tempdir = None
    secrets.randbits = lambda _bits: 12345  # one seed for all runs
    code.snapshot = lambda folder: folder.mkdir(exist_ok=True)  # the forks have the modules
    disk = disk or Disk("nowhere")
    disk.install()
    faults.install(disk)
    forking.take_over()
    forking.log_pids(folder / "pids")


class Kernel:
    """The notebook's process: it submits, and lives on until it is told to end."""

    def __init__(self, folder: pathlib.Path, notes: pathlib.Path, policy: RestartPolicy, **options: Any) -> None:
        reads, self._told = os.pipe()
        answers, writes = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            process.die_with_parent(os.getppid())
            forking.be(lambda: _submit(folder, notes, policy, reads, writes, options), keep=(reads, writes))
        os.close(reads)
        os.close(writes)
        with os.fdopen(answers) as file:
            self.answer: dict[str, Any] = json.loads(file.readline() or "{}")

    def end(self) -> None:
        os.close(self._told)
        os.waitpid(self.pid, 0)


def _submit(
    folder: pathlib.Path, notes: pathlib.Path, policy: RestartPolicy, reads: int, writes: int, options: dict[str, Any]
) -> None:
    max_steps, volume = options.pop("max_steps", None), options.pop("volume", str(folder / "volume"))
    train = distributed(gpus=2, restarts=policy, **options)(job.train)
    try:
        told = {"path": train.submit(volume, str(notes), max_steps).path}
    except BaseException as error:  # an interrupt too: it is what the notebook shows
        told = {"error": f"{type(error).__name__}: {error}"}
    os.write(writes, json.dumps(told).encode() + b"\n")
    os.close(writes)
    select.select([reads], [], [])


def bring_to_end(
    run: Run, disk: Disk | None = None, *, most: int = 3, seconds: float = END_SECONDS
) -> tuple[list[str], list[str]]:
    """Waits, and resumes what did not succeed, with what was wrong mended; the states, and the errors told."""
    states, errors = [], []
    for _ in range(most):
        try:
            states.append(run.wait(seconds))
        except TimeoutError as error:
            states.append("DOES NOT END")
            run.cancel()
            errors.append(str(error))
            break
        if states[-1] == "SUCCEEDED":
            break
        try:
            run.result(0)
        except BaseException as error:  # a KeyboardInterrupt of a worker too
            errors.append(f"{type(error).__name__}: {error}")
        if disk is not None:
            disk.mend()
        run.resume()
    return states, errors


def undisturbed(folder: pathlib.Path) -> dict[str, Any]:
    """What all cells have to come to."""
    prepare(folder)
    started = time.monotonic()
    run, _ = _start(folder, folder / "notes")
    assert run.wait(END_SECONDS) == "SUCCEEDED", run.status
    seconds = time.monotonic() - started
    short, _ = _start(folder, folder / "second", max_steps=2)
    assert short.wait(END_SECONDS) == "SUCCEEDED", short.status
    return {
        "results": run.result(0), "short": short.result(0), "seconds": seconds,
        "ledger": oracles.plain(job.read_ledger(folder / "notes")), "fingerprint": oracles.fingerprint(run, folder),
    }  # fmt: skip


def _start(folder: pathlib.Path, notes: pathlib.Path, **options: Any) -> tuple[Run, Kernel]:
    kernel = Kernel(folder, notes, RestartPolicy(), **options)
    kernel.end()
    return Run.open(kernel.answer["path"]), kernel


def struck(
    folder: pathlib.Path, *, kind: str, moment: str, expected: Mapping[str, Any], defect: str = "", control: str = ""
) -> dict[str, Any]:
    """Runs the cell; what is wrong with how it went, and what was seen.

    Args:
        defect: of planted.py, which the product is to have; `control`: its cell, without it.
    """
    planted, limit = PLANTED.get(defect or control), END_SECONDS
    cell = Cell.of(kind, moment, planted.failpoints if planted is not None else "")
    disk = Disk(cell.place, reading=cell.reading)
    prepare(folder, failpoints=cell.failpoints, disk=disk)
    if defect and planted is not None:
        planted.plant()
        limit = planted.seconds
    seen = _see(cell, folder, disk, limit)
    problems = oracles.judge(cell, seen, expected)
    os.environ["SGPU_FAILPOINT"] = ""
    again, _ = _start(folder, folder / "second", max_steps=2)
    problems += oracles.second_life(again, expected)
    sgpu.cleanup()
    problems += oracles.left(folder)
    return {"problems": problems, **seen.told()}


def _see(cell: Cell, folder: pathlib.Path, disk: Disk, limit_seconds: float) -> oracles.Seen:
    """From the call in a notebook to the end of the run."""
    started = time.monotonic()
    remote = cell.kind.name == "remote 5xx"
    url = f"remote://{folder}" if remote else str(folder)
    kernel = Kernel(
        folder, folder / "notes", cell.policy, timeout_seconds=cell.timeout_seconds, volume=f"{url}/volume",
        checkpoints=f"{url}/bucket/checkpoints" if remote else None,
    )  # fmt: skip
    told, runs = kernel.answer.get("error"), sgpu.runs()
    states, errors = list[str](), [told] if told else []
    if told:
        disk.mend()
    if runs:
        states, more = bring_to_end(runs[0], disk, seconds=limit_seconds)
        errors += more
    seconds = time.monotonic() - started
    disk.mend()
    disk.jump(0.0)
    _end(kernel)
    return oracles.Seen(
        folder=folder, run=runs[0] if runs else None, states=tuple(states), errors=tuple(errors), seconds=seconds,
        disk_struck=disk.struck,
    )  # fmt: skip


def _end(kernel: Kernel) -> None:
    try:
        kernel.end()
    except ChildProcessError:
        return
