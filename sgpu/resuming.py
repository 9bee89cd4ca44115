"""Starting a run again: as itself, or as a new run from one of its checkpoints."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from typing import Any

from sgpu import checkpoint, settings
from sgpu.checkpoint.format import names
from sgpu.contract.errors import InputError
from sgpu.contract.exits import exit_code
from sgpu.contract.process import this_process
from sgpu.contract.rundir import RunDir, runs_folder
from sgpu.contract.spec import RunSpec, new_run_id, read_spec
from sgpu.contract.status import Status, read_status
from sgpu.launch import registry
from sgpu.launch.local import Local


def root_of(run: RunDir, spec: RunSpec) -> str:
    """Where its checkpoints are."""
    return spec.checkpoints.root or str(run.checkpoints)


def resume(run: RunDir, status: Status, step: int | None = None) -> RunDir:
    """The run that goes on: this one, or a new one. See `Run.resume`."""
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise InputError(f"resume(step=...): expected a whole number, 0 or more, or None; found {step!r}")
    spec = read_spec(run)
    if step is None or goes_on_itself(run, spec, status, step):
        _again(run, spec, status)
        return run
    return branch(run, spec, step)


def goes_on_itself(run: RunDir, spec: RunSpec, status: Status, step: int) -> bool:
    """Whether going on from this step is what the run, started again, would do."""
    if not status.final or status.state == "SUCCEEDED":
        return False
    newest = checkpoint.find_latest_valid(root_of(run, spec))
    found = names.parse_step(newest.rpartition("/")[2]) if newest else None
    return found is not None and found.step == step


def _again(run: RunDir, spec: RunSpec, status: Status) -> None:
    """The same run, from its newest valid checkpoint.

    Raises:
        InputError: it is running, or it succeeded.
    """
    if not status.final:
        raise InputError(
            f"run {run.id} is {status.state}; there is nothing to resume. A new run begins at one of its checkpoints "
            "with resume(step=...), or `sgpu resume ID --step N`"
        )
    if status.state == "SUCCEEDED":
        raise InputError(
            f"run {run.id} has succeeded; call the function again for another run, or begin one at a checkpoint of "
            "this with resume(step=...), or `sgpu resume ID --step N`"
        )
    for told in (run.cancel, run.status, run.agent, run.controller):
        told.unlink(missing_ok=True)
    registry.find(spec.backend).start(spec, run)


def start_other_nodes(run: RunDir) -> list[str]:
    """Of a run on simulated nodes, which nobody else would start: all but the first; the command for that one.

    Empty for other runs. Nothing is started where the run has ended for good, which the command will say.
    """
    spec, status = read_spec(run), read_status(run)
    if spec.backend != Local().name or spec.nodes == 1:
        return []
    backend = Local()
    if status is None or not status.final or exit_code(status).goes_on:
        for node in range(1, spec.nodes + spec.spares):
            backend.start_node(spec, run, node)
    return backend.command(spec, run)


def branch(run: RunDir, spec: RunSpec, step: int) -> RunDir:
    """A new run of the same function, arguments and seed that begins at a checkpoint of this one.

    It has a folder and a root of checkpoints of its own, and this run stays as it is.

    Raises:
        CheckpointNotFoundError, CheckpointCorruptError: there is no such valid step.
        InputError: the new run's folder cannot be written.
    """
    found = _branched(run, spec, step)
    new = RunDir(runs_folder(settings.home()) / found.id)
    try:
        new.create()
        checkpoint.Catalog(root_of(run, spec)).copy(step, root_of(new, found))
        shutil.copy2(run.payload, new.payload)
        if run.code.exists():
            shutil.copytree(run.code, new.code, dirs_exist_ok=True)
        found.write(new)
    except OSError as error:
        shutil.rmtree(new.root, ignore_errors=True)
        raise InputError(
            f"run {run.id} cannot be begun again at step {step}: {type(error).__name__}: {error}", path=str(new.root)
        ) from error
    except BaseException:
        shutil.rmtree(new.root, ignore_errors=True)
        raise
    registry.find(found.backend).start(found, new)
    return new


def _branched(run: RunDir, spec: RunSpec, step: int) -> RunSpec:
    name = new_run_id(spec.name)
    root = spec.checkpoints.root
    changes: dict[str, Any] = {
        "id": name, "created": time.time(), "launcher": vars(this_process()),
        "on_launcher_exit": settings.on_kernel_exit(), "tags": {**spec.tags, "sgpu.begun_at": f"{run.id} step {step}"},
        "checkpoints": replace(spec.checkpoints, root=f"{root.rstrip('/')}-{name}" if root else None),
    }  # fmt: skip
    return replace(spec, **changes)
