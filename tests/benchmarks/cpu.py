"""CPU time of this process and of all that it started, which other processes of the machine hardly change."""

from __future__ import annotations

import os
import time

import psutil

_OF_A_PROCESS = 2  # clock_getcpuclockid(3), which Python does not have: all threads, those that have ended too


class CpuClock:
    """Runs from when it is made, without what it takes to look for processes. One that has ended is not counted."""

    def __init__(self) -> None:
        self._before = _of_others()
        self._before[os.getpid()] = time.process_time()

    def seconds(self) -> float:
        return sum(self.by_process().values())

    def by_process(self) -> dict[int, float]:
        """Seconds of each process that lives, by its id."""
        own = time.process_time()
        now = {os.getpid(): own, **_of_others()}
        return {pid: seconds - self._before.get(pid, 0.0) for pid, seconds in now.items()}


def _of_others() -> dict[int, float]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        try:
            found[process.pid] = time.clock_gettime(~process.pid << 3 | _OF_A_PROCESS)
        except OSError:  # it ended meanwhile
            continue
    return found
