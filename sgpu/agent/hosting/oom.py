"""Which process the kernel killed for want of memory: its exit status is a SIGKILL like any other."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Sequence
from typing import Protocol

_KILLED = re.compile(rb"oom-kill:.*\bpid=(\d+)|Killed process (\d+)")
_RECORD_BYTES = 8192


class OomSource(Protocol):
    """Order of calls: made before the process is started, then `killed` once it has ended by SIGKILL."""

    def killed(self, pid: int) -> bool:
        """Whether it was the kernel's doing, as far as this source knows."""


class CgroupCounter:
    """The `oom_kill` counter of this process' control group, which its children share: `pid` is not told apart.

    Args:
        root: where control groups are mounted.
        membership: the file that tells which ones this process is in.
    """

    def __init__(
        self, root: pathlib.Path = pathlib.Path("/sys/fs/cgroup"),
        membership: pathlib.Path = pathlib.Path("/proc/self/cgroup"),
    ) -> None:  # fmt: skip
        self._root, self._membership = root, membership
        self._count = self._read()

    def killed(self, pid: int) -> bool:
        before, self._count = self._count, self._read()
        return self._count > before

    def _read(self) -> int:
        return sum(_counter(path) for path in self._files())

    def _files(self) -> set[pathlib.Path]:
        try:
            lines = self._membership.read_text().splitlines()
        except OSError:
            lines = []
        # In a container the group's own folder may be mounted as the root.
        found = {self._root / "memory.events", self._root / "memory" / "memory.oom_control"}
        for line in lines:
            _, controllers, path = line.split(":", 2)
            if controllers == "":  # version 2
                found |= {base / path.lstrip("/") / "memory.events" for base in (self._root, self._root / "unified")}
            elif "memory" in controllers.split(","):
                found.add(self._root / "memory" / path.lstrip("/") / "memory.oom_control")
        return found


def _counter(path: pathlib.Path) -> int:
    """`oom_kill N` in a file of a control group; 0 where it cannot be read."""
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(word[1]) for word in words if len(word) == 2 and word[0] == "oom_kill"), 0)


class KernelLog:
    """What the kernel says of processes that it killed, by number; only for who may read it, and outside containers."""

    def __init__(self, path: pathlib.Path = pathlib.Path("/dev/kmsg")) -> None:
        self._killed: set[int] = set()
        self._descriptor = -1
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._descriptor, 0, os.SEEK_END)
        except OSError:
            return  # not for us

    def killed(self, pid: int) -> bool:
        for record in self._records():
            self._killed.update(int(match[1] or match[2]) for match in _KILLED.finditer(record))
        return pid in self._killed

    def _records(self) -> Sequence[bytes]:
        found: list[bytes] = []
        while self._descriptor >= 0:
            try:
                record = os.read(self._descriptor, _RECORD_BYTES)
            except BrokenPipeError:
                continue  # records were overwritten before they were read; the next ones are there
            except OSError:
                break  # no more for now
            if not record:
                break
            found.append(record)
        return found


class AnyOf:
    """Several sources: what one of them knows."""

    def __init__(self, *sources: OomSource) -> None:
        self._sources = sources

    def killed(self, pid: int) -> bool:
        told = [source.killed(pid) for source in self._sources]  # all are asked: each keeps count
        return any(told)
