"""Doing something again and again, but not too often."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sgpu.contract.clock import Clock

INTERVAL_SECONDS = 0.2


class Pacer:
    """Says when it is time again."""

    def __init__(self, clock: Clock, interval_seconds: float) -> None:
        self._clock, self._interval_seconds = clock, interval_seconds
        self._last: float | None = None

    def due(self) -> bool:
        """True at first, and when the interval has passed since it last was."""
        now = self._clock.monotonic()
        if self._last is not None and now - self._last < self._interval_seconds:
            return False
        self._last = now
        return True


class Follower:
    """Calls `step` about five times a second in a daemon thread until it returns True or `stop` is called."""

    def __init__(self, step: Callable[[], bool], *, interval_seconds: float = INTERVAL_SECONDS) -> None:
        self._step = step
        self._interval_seconds = interval_seconds
        self._asked_to_end = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sgpu-view", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self._asked_to_end.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _loop(self) -> None:
        while not self._step():
            if self._asked_to_end.wait(self._interval_seconds):
                return
