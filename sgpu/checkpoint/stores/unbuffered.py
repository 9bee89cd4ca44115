"""Writes large files past the page cache. Without torch.

A copy of each checkpoint in the page cache costs more CPU time than all the rest of a save, evicts what the training
reads, and is of no use: who restarts on this node restores from the staged memory.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable

PAGE_BYTES = 4096
LEAST_BYTES = 2**20
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux has it

Observe = Callable[[memoryview], None]


def write(descriptor: int, pieces: Iterable[memoryview], observe: Observe | None) -> int:
    """Writes `pieces` one after the other from the file's begin on; returns their bytes.

    Whole pages of large pieces go past the cache where the file system and the place of the bytes in memory allow it;
    all else goes through it, so the file still has to be synced.
    """
    written = 0
    able = _DIRECT != 0
    for piece in pieces:
        if observe is not None:
            observe(piece)
        pages = piece.nbytes - piece.nbytes % PAGE_BYTES
        if able and pages >= LEAST_BYTES and written % PAGE_BYTES == 0:
            done = _write_direct(descriptor, piece[:pages])
            able = done == pages
        else:
            done = 0
        _write_all(descriptor, piece[done:])
        written += piece.nbytes
    return written


def _write_direct(descriptor: int, pages: memoryview) -> int:
    """Bytes written; fewer than there are where the rest has to go through the cache."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        while done < pages.nbytes and done % PAGE_BYTES == 0:
            done += os.write(descriptor, pages[done:])
    except OSError as error:
        if error.errno != errno.EINVAL:  # said by file systems that cannot, and of memory that is not aligned
            raise
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
    return done


def _write_all(descriptor: int, piece: memoryview) -> None:
    done = 0
    while done < piece.nbytes:
        done += os.write(descriptor, piece[done:])
