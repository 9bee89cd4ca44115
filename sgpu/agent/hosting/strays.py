"""Ends what workers started in sessions of their own: it has become the agent's (see process.adopt_orphans)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Callable, Iterable

from sgpu.contract import process

_ROUNDS = 20
_END_SECONDS = 2.0


def end(spared: Callable[[], Iterable[int]]) -> None:
    """Kills all descendants of this process but `spared` and theirs, and comes back when they are gone."""
    for _ in range(_ROUNDS):  # one may have started another in the meantime
        found = process.descendants(os.getpid())
        kept = _with_descendants(spared()) | _with_descendants(spared())  # one may have handed over to its child
        ended = [_end(pid) for pid in found if pid not in kept]
        if not any(ended):
            return


def _with_descendants(pids: Iterable[int]) -> set[int]:
    pids = set(pids)
    return pids.union(*(process.descendants(pid) for pid in pids))


def _end(pid: int) -> bool:
    """Kills one; False where it was gone already."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        alive = not select.select([descriptor], [], [], 0)[0]
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        select.select([descriptor], [], [], _END_SECONDS)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    with contextlib.suppress(ChildProcessError):  # a grandchild: its own parent's to collect, or ours in the next round
        os.waitpid(pid, os.WNOHANG)
    return alive
