"""Names for processes that tell later whether their owner still lives, and things that are removed with their owner."""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import time
from functools import lru_cache

_OTHER_HOST_SECONDS = 24 * 3600.0
_numbers = itertools.count()


def _start_ticks(pid: int) -> int | None:
    """When the process began, in ticks since boot; None where there is no such process (or it is a zombie)."""
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


@lru_cache(maxsize=4)
def name_of(pid: int) -> str:
    """A living process, as the first part of a file's name."""
    return f"{os.uname().nodename}~{pid}~{_start_ticks(pid) or 0}"


def new_name() -> str:
    """A name of its own for this process; `owner_lives` knows its owner."""
    return f"{name_of(os.getpid())}~{next(_numbers)}"


def owner_lives(path: pathlib.Path) -> bool:
    """Whether the process that named this file lives. Of another machine's: whether it was touched within a day."""
    host, pid, ticks = path.name.split("~")[:3]
    if host == os.uname().nodename:
        return _start_ticks(int(pid)) == int(ticks)
    try:
        return time.time() - path.stat().st_mtime < _OTHER_HOST_SECONDS
    except FileNotFoundError:
        return False


def sweep(folder: pathlib.Path) -> int:
    """Removes what dead processes left in `folder`. Returns the bytes of the files that went."""
    size = 0
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0
    for name in names:
        path = folder / name
        if name.count("~") < 3 or owner_lives(path):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            try:
                found = path.stat().st_size
                path.unlink()
            except FileNotFoundError:  # another process sweeps too
                continue
            size += found
    return size


def remove_own(path: pathlib.Path, pid: int) -> None:
    """Removes a file or folder if this is still the process that made it (and not a fork of it)."""
    if os.getpid() != pid:
        return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def remove_own_named(folder: pathlib.Path) -> None:
    """Removes all that this process named in `folder`."""
    for path in folder.glob(f"{name_of(os.getpid())}~*"):
        remove_own(path, os.getpid())
