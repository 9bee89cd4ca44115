"""Being asked to stop: by the supervisor through the heartbeat page, or by a signal."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from sgpu.contract.exits import ExitCode
from sgpu.contract.heartbeat import Request, Slot


class Preempted(SystemExit):
    """Raised out of the loop once its state is saved. No Exception: a user's `except Exception` must not stop it.

    A script that it ends has the exit status by which schedulers know that the work is to be gone on with.
    """

    def __init__(self, message: str) -> None:
        super().__init__(int(ExitCode.PREEMPTED))
        self.message = message

    def __str__(self) -> str:
        return self.message


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_live: list[StopRequest] = []


def _note(number: int, _frame: FrameType | None) -> None:
    for request in _live:
        request.note(number)


def forget_requests() -> None:
    """The function was given up: loops that it had made are asked nothing any more."""
    while _live:
        _live[-1].close()


class StopRequest:
    """Whether this rank was asked to save and stop, and by when."""

    def __init__(self, slot: Slot | None) -> None:
        self._slot = slot
        self._signal: int | None = None
        self._told: int | None = None
        self._closed = False

    def listen(self) -> None:
        """From now until `close`, SIGTERM and SIGUSR1 set a flag (in the main thread, where nobody else handles them).

        Not sooner than somebody looks at it: a loop that is made and never begun would keep its process from ending.
        """
        if self._closed or self in _live:
            return
        _live.append(self)
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _note)

    def note(self, number: int) -> None:
        self._signal = number

    @property
    def signalled(self) -> bool:
        """Whether this rank got a signal; other ranks may not have."""
        return self._signal is not None

    def newly_signalled(self) -> bool:
        """True once after a signal."""
        before, self._told = self._told, self._signal
        return before is None and self._signal is not None

    def due(self, step: int) -> bool:
        """Whether the supervisor asked to stop after `step` (the same step for every rank)."""
        if self._slot is None:
            return False
        asked = self._slot.requested()
        return asked.what is Request.SAVE_AND_STOP and step >= asked.stop_step

    def seconds_left(self) -> float | None:
        """Until this machine is gone; None: nobody said so."""
        asked = self._slot.requested() if self._slot is not None else None
        if asked is None or asked.what is not Request.SAVE_AND_STOP or not asked.deadline_ns:
            return None
        return (asked.deadline_ns - time.monotonic_ns()) / 1e9

    def close(self) -> None:
        self._closed = True
        if self in _live:
            _live.remove(self)
        if _live or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if signal.getsignal(number) is _note:
                signal.signal(number, signal.SIG_DFL)
