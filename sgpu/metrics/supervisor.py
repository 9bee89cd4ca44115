"""Whether whoever keeps the run is still there, and waiting without missing its end or a signal."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType

import psutil

from sgpu.contract.process import read_process
from sgpu.contract.rundir import RunDir


def agent_alive(run: RunDir) -> bool:
    """Whether the process of agent.json runs; a process that only has its number since does not count."""
    agent = read_process(run.agent)
    return agent is not None and agent.alive()


class Parent:
    """The process that started this one; None: nobody is watched, agent.json alone tells."""

    def __init__(self, pid: int | None) -> None:
        self.pid, self.gone = pid, False
        self._descriptor: int | None = None
        if pid is None:
            return
        try:
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self.gone = True
        except OSError:  # a sandbox without pidfds: `look` asks by number
            self.look()

    def fileno(self) -> int | None:
        """Readable once it has ended; None when there is nothing to wait for."""
        return None if self.gone else self._descriptor

    def look(self) -> None:
        if self.gone or self.pid is None:
            return
        if self._descriptor is None:
            self.gone = not psutil.pid_exists(self.pid)
        else:
            self.gone = bool(select.select([self._descriptor], [], [], 0)[0])

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class DeadlinePassed(BaseException):
    """The time that this process may still take is over, whatever it waits for."""


class Signals:
    """SIGTERM asks for an end; a deadline interrupts a call that hangs; both wake `wait`."""

    def __init__(self, *, end_seconds: float) -> None:
        """`end_seconds`: how long after SIGTERM the deadline is."""
        self.asked_to_end, self._end_seconds = False, end_seconds
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the run, which ends us in order
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)

    def wait(self, seconds: float, parent: Parent) -> None:
        """Until a signal, the parent's end, or `seconds` have passed."""
        watched: list[int] = [self._read]
        if (other := parent.fileno()) is not None:
            watched.append(other)
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._read in ready:
            os.read(self._read, 4096)
        parent.look()

    def set_deadline(self, seconds: float) -> None:
        """DeadlinePassed is raised after so many seconds, and each second from then on, in case somebody ate it."""
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001), 1.0)

    def clear_deadline(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        if not self.asked_to_end:
            self.asked_to_end = True
            self.set_deadline(self._end_seconds)

    def _on_alarm(self, number: int, frame: FrameType | None) -> None:
        raise DeadlinePassed
