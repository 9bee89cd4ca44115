"""Copies that found no room in the cache: this process' own, soon gone."""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import tempfile
import threading
import weakref
from collections import deque

from sgpu.contract.errors import VolumeError
from sgpu.data.processes import living
from sgpu.data.processes.forking import anew_in_forks

_KEPT = 4096
_serial = itertools.count()


class PrivateCopies:
    """The last so many; each in a folder of its own, so that equal names do not meet."""

    def __init__(self, volume: str, url: str) -> None:
        self._volume, self._url = volume, url
        self.kept = _KEPT
        self.begin_anew()
        anew_in_forks(self)

    def begin_anew(self) -> None:
        """For a forked process: what its parent keeps goes with that."""
        self._opened: tuple[pathlib.Path, deque[str]] | None = None
        self._opening = threading.Lock()

    def place(self, path: str) -> str:
        """Where to put the file; labels are in the folders' names, so these stay."""
        folder, _ = self._folder()
        place = folder / str(next(_serial)) / self._volume / path
        place.parent.mkdir(mode=0o700, parents=True)
        return str(place)

    def keep(self, place: str) -> None:
        """It is there now; the oldest goes."""
        folder, held = self._folder()
        held.append(str(folder / pathlib.Path(place).relative_to(folder).parts[0]))
        while len(held) > self.kept:
            shutil.rmtree(held.popleft(), ignore_errors=True)

    def _folder(self) -> tuple[pathlib.Path, deque[str]]:
        with self._opening:
            if self._opened is None:
                self._opened = self._new_folder(), deque()
            return self._opened

    def _new_folder(self) -> pathlib.Path:
        above = private_root()
        above.mkdir(exist_ok=True, mode=0o700)
        if above.is_symlink() or above.stat().st_uid != os.getuid():
            raise VolumeError(f"{above} belongs to somebody else; remove it or set TMPDIR", url=self._url)
        living.sweep(above)
        folder = above / living.new_name()
        folder.mkdir(mode=0o700)
        weakref.finalize(self, living.remove_own, folder, os.getpid())
        return folder


def private_root() -> pathlib.Path:
    """Where they live; each folder in it goes with its process."""
    return pathlib.Path(tempfile.gettempdir()) / f"sgpu-private-{os.getuid()}"


def private_name(path: str) -> str | None:
    """The path inside the volume of a private copy; None where the path is none."""
    above = f"{private_root()}/"
    if not path.startswith(above):
        return None
    _, _, _, name = path[len(above) :].split("/", 3)  # process, serial number, volume's folder, path
    return name
