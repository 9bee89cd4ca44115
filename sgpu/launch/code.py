"""The user's local modules, copied beside the run: what runs is what stood on disk at the call, also after a restart.

A notebook that imported `helpers.py`, edited it and calls again runs the edited one, without restarting its kernel.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
from collections.abc import Iterable
from types import ModuleType

from sgpu.contract import installed

_MOST_BYTES = 20 * 2**20
_MOST_FILES = 2000
_SKIPPED = frozenset({"__pycache__", ".git", ".venv", "node_modules", ".ipynb_checkpoints"})


def local_modules(modules: Iterable[tuple[str, ModuleType]]) -> dict[str, pathlib.Path]:
    """Top-level names whose file or folder is the user's own: neither installed nor of Python itself."""
    folders = installed.folders()
    found: dict[str, pathlib.Path] = {}
    for name, module in modules:
        if "." in name or name in ("__main__", "__mp_main__", "sgpu"):
            continue
        place = _place(module)
        if place is None or any(place.is_relative_to(folder) for folder in folders):
            continue
        found[name] = place
    return found


def _place(module: ModuleType) -> pathlib.Path | None:
    file = getattr(module, "__file__", None)
    if file is None:
        folders = list(getattr(module, "__path__", []))  # a package without __init__.py
        return pathlib.Path(folders[0]).resolve() if folders and os.path.isdir(folders[0]) else None
    path = pathlib.Path(file).resolve()
    return path.parent if path.name == "__init__.py" else path


def snapshot(target: pathlib.Path) -> list[str]:
    """Copies this process' local modules into `target`; the names that were too large and are used in place."""
    left = []
    for name, place in local_modules(sys.modules.copy().items()).items():
        if not place.exists():
            continue
        if place.is_file():
            shutil.copy2(place, target / place.name)
        elif _small(place):
            shutil.copytree(
                place, target / name, ignore=lambda _, names: _SKIPPED & set(names), dirs_exist_ok=True, symlinks=False,
                ignore_dangling_symlinks=True,
            )  # fmt: skip
        else:
            left.append(name)
    return left


def _small(folder: pathlib.Path) -> bool:
    size_bytes = files = 0
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in _SKIPPED]
        files += len(names)
        size_bytes += sum(os.lstat(os.path.join(root, name)).st_size for name in names)
        if files > _MOST_FILES or size_bytes > _MOST_BYTES:
            return False
    return True
