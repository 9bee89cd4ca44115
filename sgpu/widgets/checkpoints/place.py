"""Where checkpoints are: of a folder, a URL, a run, or a run's id."""

from __future__ import annotations

import os
import pathlib
from dataclasses import dataclass

from sgpu import settings
from sgpu.contract.errors import InputError, SgpuError
from sgpu.contract.places import check_place
from sgpu.contract.rundir import RunDir, find_run
from sgpu.contract.spec import RunSpec, read_spec


@dataclass(frozen=True, kw_only=True)
class Place:
    """A root of checkpoints, and the run that writes them where that is known."""

    root: str
    run: RunDir | None = None
    spec: RunSpec | None = None


def find_place(root_or_run: str | os.PathLike[str] | RunDir) -> Place:
    """The root that is meant.

    Raises:
        InputError: it is neither a folder, nor a URL, nor a run.
    """
    if isinstance(root_or_run, RunDir):
        return _of_run(root_or_run)
    if not isinstance(root_or_run, (str, os.PathLike)):
        raise InputError(
            f"expected a run, its id, or a folder or URL with checkpoints; found {type(root_or_run).__name__}"
        )
    text = os.fspath(root_or_run)
    check_place("root_or_run", text)
    if "://" in text:
        return Place(root=text)
    folder = pathlib.Path(text).expanduser().absolute()
    if (folder / "spec.json").exists():
        return _of_run(RunDir(folder))
    if folder.is_dir():
        return _with_run(folder)
    if os.sep in text or folder.exists():
        raise InputError(f"{text}: expected a folder that holds checkpoints; there is no such folder")
    return _of_run(find_run(settings.home(), text))


def _of_run(run: RunDir) -> Place:
    spec = read_spec(run)
    return Place(root=spec.checkpoints.root or str(run.checkpoints), run=run, spec=spec)


def _with_run(folder: pathlib.Path) -> Place:
    """A run's own `checkpoints/` is known by the folder around it."""
    run = RunDir(folder.parent)
    if run.checkpoints != folder or not run.spec.exists():
        return Place(root=str(folder))
    try:
        return Place(root=str(folder), run=run, spec=read_spec(run))
    except SgpuError:  # another version's run; its checkpoints can be looked at all the same
        return Place(root=str(folder))
