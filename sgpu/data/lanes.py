"""Threads that bring files, as many as it pays to have."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from sgpu.data.flight import Flight

_WINDOW_SECONDS = 0.5


class Lanes:
    """Runs tasks on threads; how many at a time follows from the bytes that they say they brought.

    Args:
        flight: where the number of threads begins, and its bounds.
        clock: seconds.
    """

    def __init__(self, flight: Flight, clock: Callable[[], float] = time.monotonic) -> None:
        self.flight = flight
        self._clock = clock
        self._tasks: deque[Callable[[], int]] = deque()
        self._changed = threading.Condition()
        self._running = 0
        self._window_began, self._window_bytes, self._starved = clock(), 0, False

    def submit(self, task: Callable[[], int]) -> None:
        """`task` returns the bytes that it brought, and raises nothing. Returns at once."""
        with self._changed:
            self._tasks.append(task)
            self._start_some()

    def drain(self) -> None:
        """Until every task is done."""
        with self._changed:
            self._changed.wait_for(lambda: not self._tasks and not self._running)

    def _start_some(self) -> None:
        """Called with the lock. A thread more for each task that waits, up to the number that pays."""
        for _ in range(min(len(self._tasks), self.flight.limit - self._running)):
            self._running += 1
            threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        brought = 0
        while True:
            with self._changed:
                self._count(brought)
                if not self._tasks or self._running > self.flight.limit:
                    self._starved = self._starved or not self._tasks
                    self._running -= 1
                    self._changed.notify_all()
                    return
                task = self._tasks.popleft()
            brought = task()

    def _count(self, brought: int) -> None:
        """Called with the lock. A window that is over moves the number."""
        self._window_bytes += brought
        now = self._clock()
        seconds = now - self._window_began
        if seconds < _WINDOW_SECONDS:
            return
        self.flight = self.flight.after(self._window_bytes / seconds, busy=not self._starved)
        self._window_began, self._window_bytes, self._starved = now, 0, False
        self._start_some()
