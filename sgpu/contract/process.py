"""A process by more than its number: a pid that was given to another process since is not believed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from sgpu.contract import atomic

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
LISTENER = "sgpu-control"  # the name, to the kernel too, of a worker's thread that hears its agent


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """`started` is the start time in clock ticks since boot, as in /proc/<pid>/stat."""

    pid: int
    started: int

    @property
    def started_ns(self) -> int:
        """On the monotonic clock, whose zero is the same boot (true unless the machine was suspended)."""
        return self.started * 10**9 // os.sysconf("SC_CLK_TCK")

    def alive(self) -> bool:
        """False for a zombie too."""
        found = _stat(self.pid)
        return found is not None and found[1] == self.started and found[0] not in "ZX"

    def signal(self, number: int) -> bool:
        """Sends a signal if it is still that process; tells whether it was."""
        if not self.alive():
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def write(self, path: pathlib.Path) -> None:
        atomic.write_json(path, asdict(self))


def read_process(path: pathlib.Path) -> ProcessId | None:
    value = atomic.read_json(path)
    return ProcessId(**value) if value is not None else None


def process_of(pid: int) -> ProcessId | None:
    found = _stat(pid)
    return ProcessId(pid=pid, started=found[1]) if found is not None else None


def this_process() -> ProcessId:
    found = process_of(os.getpid())
    if found is None:
        raise RuntimeError("/proc is not readable; sgpu needs a Linux /proc")
    return found


_began_anew_ns: int | None = None


def begin_anew() -> None:
    """This process takes the place of another, which was its own."""
    global _began_anew_ns
    _began_anew_ns = time.monotonic_ns()


def began_ns() -> int:
    """When what this process is now began, monotonic: it, or its newest place."""
    return _began_anew_ns if _began_anew_ns is not None else this_process().started_ns


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def state_of(pid: int) -> str | None:
    """The kernel's letter: R, S, D, T (stopped), Z, ...; None where there is no such process."""
    found = _stat(pid)
    return found[0] if found is not None else None


def parent_of(pid: int) -> int | None:
    try:
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(text.rpartition(")")[2].split()[1])


def descendants(pid: int) -> list[int]:
    """All that stem from `pid` now, children before their own children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            parent = parent_of(int(name))
            if parent is not None:
                children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found.extend(below)
        todo.extend(below)
    return found


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """The kernel sends this process `number` when its parent ends; ends now if it has already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def ended_children() -> Iterator[tuple[int, int]]:
    """Children of this process that have ended: pid and wait status. Waits for none."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def adopt_orphans() -> None:
    """Descendants whose parent ends become children of this process, so that none is lost sight of."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_this_thread(name: str) -> None:
    """As the kernel and its tools show it: 15 characters at most. Where /proc may not be written, it has no name."""
    with contextlib.suppress(OSError):
        pathlib.Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def _prctl(option: int, value: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"prctl({option})")
