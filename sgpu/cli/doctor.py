"""`sgpu doctor`: what this machine has, whether it is healthy, and what would keep a run from working."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import typer

import sgpu
from sgpu import settings
from sgpu.cli import screen
from sgpu.contract.errors import InputError
from sgpu.health.checkup import Checkup, context_here
from sgpu.health.probe import Verdict as Health
from sgpu.launch import registry
from sgpu.metrics import store
from sgpu.metrics.mlflow_reader import default_tracking

Verdict = Literal["ok", "note", "unknown", "BAD"]
_MARKS: dict[Health, Verdict] = {
    Health.OK: "ok", Health.UNKNOWN: "unknown", Health.DEGRADED: "note", Health.FAILED: "BAD",
}  # fmt: skip
_PROBE_SECONDS = 60.0  # a wedged driver hangs whoever asks it; this asks from a process of its own
_SERVER_SECONDS = 5.0
_SCARCE_BYTES = 2 * 10**9
_TORCH = (
    "import torch; n = torch.cuda.device_count(); "
    "print(torch.__version__, torch.version.cuda, n, *[torch.cuda.get_device_name(i) for i in range(n)], sep='\\n')"
)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report. `BAD` means that runs will fail, `unknown` that it could not be looked at."""

    what: str
    verdict: Verdict
    found: str


def _versions() -> Iterator[Finding]:
    python = platform.python_version()
    yield Finding(what="python", verdict="ok", found=f"{python} ({sys.executable})")
    yield Finding(what="sgpu", verdict="ok", found=f"{sgpu.__version__} ({pathlib.Path(sgpu.__file__).parent})")
    for package in ("mlflow", "numpy", "cloudpickle", "fsspec", "crc32c"):
        yield _package(package, verdict="BAD")
    for package in ("anywidget", "ipywidgets", "s3fs", "safetensors"):
        yield _package(package, verdict="note")


def _package(package: str, *, verdict: Verdict) -> Finding:
    try:
        return Finding(what=package, verdict="ok", found=importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Finding(what=package, verdict=verdict, found="not installed")


def _torch() -> Iterator[Finding]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            what="torch", verdict="BAD", found=f"did not answer within {_PROBE_SECONDS:g} s; a wedged driver?"
        )
        return
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding(what="torch", verdict="BAD", found=f"cannot be used: {last}")
        return
    version, cuda, count, *names = done.stdout.splitlines()
    yield Finding(what="torch", verdict="ok", found=f"{version}, CUDA {cuda}")
    yield _gpus(int(count), names)


def _gpus(usable: int, names: list[str]) -> Finding:
    visible = sgpu.Local().machine().gpus
    if usable != visible:
        found = f"{visible} visible, but torch can use {usable}; is the driver right, and torch a CUDA build?"
        return Finding(what="GPUs", verdict="BAD", found=found)
    if not visible:
        return Finding(what="GPUs", verdict="note", found="none; workers run on the CPU with gloo")
    return Finding(what="GPUs", verdict="ok", found=f"{visible}: {', '.join(names)}")


def _places() -> Iterator[Finding]:
    home = settings.home()
    yield _writable(home)
    yield _room("disk of SGPU_HOME", home)
    yield _room("/dev/shm", pathlib.Path("/dev/shm"))
    keep = settings.min_free_disk_bytes()
    kept = screen.in_bytes(keep) if keep is not None else "a tenth of the disk"
    yield Finding(what="the cache leaves free", verdict="ok", found=kept)


def _writable(home: pathlib.Path) -> Finding:
    nearest = next(folder for folder in (home, *home.parents) if folder.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Finding(what="SGPU_HOME", verdict="BAD", found=f"{home} cannot be written ({nearest})")
    return Finding(what="SGPU_HOME", verdict="ok", found=str(home) + ("" if home == nearest else " (not made yet)"))


def _room(what: str, place: pathlib.Path) -> Finding:
    nearest = next(folder for folder in (place, *place.parents) if folder.exists())
    usage = shutil.disk_usage(nearest)
    verdict: Verdict = "ok" if usage.free >= _SCARCE_BYTES else "note"
    return Finding(
        what=what, verdict=verdict, found=f"{screen.in_bytes(usage.free)} free of {screen.in_bytes(usage.total)}"
    )


def _tracking() -> Iterator[Finding]:
    uri = settings.tracking_uri() or default_tracking(settings.home())
    yield Finding(
        what="MLflow", verdict="ok", found=f"{_without_password(uri)}, experiment {settings.experiment_name()!r}"
    )
    if uri.startswith(("http://", "https://")):
        yield _server(uri)
    elif (file := store.sqlite_file(uri)) is not None:
        made = screen.in_bytes(file.stat().st_size) if file.exists() else "not made yet"
        yield Finding(what="MLflow store", verdict="ok", found=made)


def _without_password(uri: str) -> str:
    parts = urllib.parse.urlsplit(uri)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in uri else uri


def _server(uri: str) -> Finding:
    try:
        with contextlib.closing(urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_SERVER_SECONDS)) as answer:
            return Finding(what="MLflow server", verdict="ok", found=f"answers ({answer.status})")
    except urllib.error.HTTPError as error:
        return Finding(what="MLflow server", verdict="note", found=f"answers {error.code} to /health")
    except OSError as error:
        return Finding(
            what="MLflow server", verdict="note", found=f"does not answer ({error}); runs keep their metrics"
        )


def _backends() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    yield Finding(what="cores", verdict="ok", found=str(cores))
    for name in registry.names():
        yield Finding(what=f"back-end {name}", verdict="ok", found=f"on={name!r}")


def _health() -> Iterator[Finding]:
    visible = settings.cuda_visible_devices()
    context = context_here(
        disks=(str(settings.home()), tempfile.gettempdir()), gpus=None if visible is None else tuple(visible)
    )
    for finding in Checkup(context, level="full", timeout_seconds=_PROBE_SECONDS).wait():
        what = f"{finding.scope}: {finding.probe}" if finding.name else finding.probe
        yield Finding(what=what, verdict=_MARKS[finding.verdict], found=finding.evidence)


SECTIONS: tuple[Callable[[], Iterator[Finding]], ...] = (_versions, _torch, _places, _health, _tracking, _backends)


def doctor() -> None:
    """Shows versions, GPUs, disks, network adapters, memory, back-ends and MLflow, and checks their health.

    Exit status 1 if something would keep runs from working. What could not be looked at is `unknown`.
    """
    bad = 0
    shown = screen.table("what", "", "found")
    for section in SECTIONS:
        try:
            for finding in section():
                bad += finding.verdict == "BAD"
                shown.add_row(finding.what, finding.verdict, finding.found)
        except InputError as error:  # a setting that cannot be read: told, and the rest is looked at
            bad += 1
            shown.add_row("settings", "BAD", str(error))
    screen.console().print(shown)
    if bad:
        raise typer.Exit(1)
