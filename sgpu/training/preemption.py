"""Being asked to stop: by the supervisor through the heartbeat page, or by a signal."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from sgpu.contract.heartbeat import Request, Slot


class Preempted(BaseException):
    """Raised out of the loop once its state is saved. No Exception: a user's `except Exception` must not stop it."""


_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_live: list[StopRequest] = []


def _note(number: int, _frame: FrameType | None) -> None:
    for request in _live:
        request.note(number)


class StopRequest:
    """Whether this rank was asked to save and stop, and by when.

    SIGTERM and SIGUSR1 set a flag (only where this is the main thread and nobody else handles them).
    """

    def __init__(self, slot: Slot | None) -> None:
        self._slot = slot
        self._signal: int | None = None
        self._told: int | None = None
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

    def close(self) -> None:
        if self in _live:
            _live.remove(self)
        if _live or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if signal.getsignal(number) is _note:
                signal.signal(number, signal.SIG_DFL)
