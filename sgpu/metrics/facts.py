"""What is told about a run besides its figures: parameters and tags."""

from __future__ import annotations

import getpass
import importlib.metadata
import pathlib
import platform
import socket
import subprocess

from sgpu.contract import records
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.contract.status import Status

_PACKAGES = ("sgpu", "torch", "numpy", "mlflow")
_GIT_SECONDS = 5.0
_TAG_CHARACTERS = 4000


def parameters(spec: RunSpec) -> dict[str, str]:
    """The function's own arguments, and what shapes the run."""
    return {"world_size": str(spec.world_size), "seed": str(spec.seed), **spec.parameters}


def tags(run: RunDir, spec: RunSpec) -> dict[str, str]:
    """Who, where, with which versions; the user's own tags beat ours."""
    ours = {
        "sgpu.run_id": spec.id,
        "sgpu.folder": str(run.root),
        "sgpu.backend": spec.backend,
        "sgpu.accelerator": spec.accelerator,
        "sgpu.world_size": str(spec.world_size),
        "sgpu.host": socket.gethostname(),
        "sgpu.version.python": platform.python_version(),
        "mlflow.user": _user(),
        "mlflow.source.name": spec.name,
        "mlflow.source.type": "NOTEBOOK",
    }
    for package in _PACKAGES:
        try:
            ours[f"sgpu.version.{package}"] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if spec.tracking.parent_run_id:
        ours["mlflow.parentRunId"] = spec.tracking.parent_run_id
    return {**ours, **_git(pathlib.Path(spec.working_dir)), **spec.tags}


def closing_tags(status: Status | None, goodput_seconds: dict[str, float]) -> dict[str, str]:
    """How it ended, and where the time went."""
    told = {f"sgpu.seconds.{name}": f"{seconds:.3f}" for name, seconds in goodput_seconds.items()}
    if status is None:
        return told
    told |= {"sgpu.state": status.state, "sgpu.restarts": str(status.restarts), "sgpu.last_step": str(status.step)}
    if status.failure and status.state != "SUCCEEDED":
        told["sgpu.failure"] = str(status.failure.get("message", ""))[:_TAG_CHARACTERS]
    return told


def bottleneck(run: RunDir) -> dict[str, str]:
    """What rank 0's loader said last of where the time goes."""
    told = [record for record in records.read_all(run.events) if record.get("kind") == "bottleneck"]
    return {"sgpu.bottleneck": str(told[-1].get("message", ""))} if told else {}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"


def _git(folder: pathlib.Path) -> dict[str, str]:
    """The commit that the user's code stands on, and whether it was changed since; nothing outside a repository."""
    commit = _git_says(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git_says(folder, "status", "--porcelain", "--untracked-files=no")
    told = {"mlflow.source.git.commit": commit, "sgpu.git.dirty": str(bool(changed)).lower()}
    branch = _git_says(folder, "rev-parse", "--abbrev-ref", "HEAD")
    return {**told, "mlflow.source.git.branch": branch} if branch else told


def _git_says(folder: pathlib.Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=_GIT_SECONDS, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
