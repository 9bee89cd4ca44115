"""The folder of a cache: made, or refused before anything is fetched."""

from __future__ import annotations

import os
import pathlib
import tempfile

from sgpu.contract.errors import InputError, VolumeError
from sgpu.data.caching.room import STATE, is_disk_full
from sgpu.data.volumes.opening import local_root


def cache_root(root: pathlib.Path, url: str) -> pathlib.Path:
    """The folder, there now.

    Raises:
        VolumeError: it lies inside the volume.
        InputError: it cannot be made or written, or belongs to another user.
    """
    volume = local_root(url)
    if volume is not None and volume in (root.resolve(), *root.resolve().parents):
        raise VolumeError(
            f"the cache folder {root} lies inside volume {url}, so its copies would become files of the volume. "
            "Name another folder with cache_dir.",
            url=url,
        )
    state = root / STATE
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as problem:
        raise InputError(
            f"cache folder {root} cannot be made: {problem.strerror}. Name another with cache_dir."
        ) from problem
    try:
        with tempfile.TemporaryFile(dir=state) as probe:  # a mount may map users: what we make here is ours
            mine = os.fstat(probe.fileno()).st_uid
        owner = state.stat().st_uid
    except OSError as problem:
        if is_disk_full(problem):
            return root
        raise InputError(
            f"cache folder {root} cannot be written: {problem.strerror}. Name another with cache_dir."
        ) from problem
    if owner != mine:
        raise InputError(
            f"cache folder {root} belongs to another user ({owner}); this process is user {mine}, and would leave "
            "files that the other cannot read or remove. Name another with cache_dir."
        )
    return root
