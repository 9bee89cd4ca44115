"""CPU time of this process and of all that it started, which other processes of the machine do not change."""

from __future__ import annotations

import time

import psutil

_OF_A_PROCESS = 2  # clock_getcpuclockid(3), which Python does not have: all threads, those that have ended too


class CpuClock:
    """Runs from when it is made. What ended before it is asked is not counted."""

    def __init__(self) -> None:
        self._before = _by_process()

    def seconds(self) -> float:
        return sum(self.by_process().values())

    def by_process(self) -> dict[int, float]:
        """Seconds of each process that lives, by its id."""
        return {pid: now - self._before.get(pid, 0.0) for pid, now in _by_process().items()}


def _by_process() -> dict[int, float]:
    own = psutil.Process()
    found = {}
    for process in (own, *own.children(recursive=True)):
        try:
            found[process.pid] = time.clock_gettime(~process.pid << 3 | _OF_A_PROCESS)
        except OSError:  # it ended meanwhile
            continue
    return found
