"""Threads that bring files, as many as it pays to have."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from sgpu.data.fetching.flight import Flight

_WINDOW_SECONDS = 0.5


class Lanes:
    """Runs tasks on threads; how many at a time follows from the bytes that they say they brought.

    Args:
        flight: where the number of threads begins, and its bounds.
        clock: seconds.
        idle_seconds: how long a thread without a task waits for the next one.
    """

    def __init__(self, flight: Flight, clock: Callable[[], float] = time.monotonic, idle_seconds: float = 0.0) -> None:
        self.flight = flight
        self._clock = clock
        self._tasks: deque[Callable[[], int]] = deque()
        lock = threading.Lock()
        self._changed, self._wanted = threading.Condition(lock), threading.Condition(lock)
        self._running = self._idle = 0
        self._idle_seconds = idle_seconds
        self._window_began, self._window_bytes, self._starved = clock(), 0, False

    def submit(self, tasks: Iterable[Callable[[], int]]) -> None:
        """Each returns the bytes that it brought, and raises nothing. Returns at once.

        Many in one call: who submits them one by one fights for the lock with the threads that work.
        """
        waiting = list(tasks)
        with self._changed:
            self._tasks.extend(waiting)
            self._wanted.notify(len(waiting))
            self._start_one()

    def drop(self) -> None:
        """Tasks that have not begun never will."""
        with self._changed:
            self._tasks.clear()
            self._changed.notify_all()

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Until every task is done; False where that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._tasks and self._running == self._idle, timeout_seconds)

    def _start_one(self) -> None:
        """Called with the lock. A thread more while tasks wait, up to the number that pays; it starts the next one."""
        if len(self._tasks) > self._idle and self._running < self.flight.limit:
            self._running += 1
            try:
                threading.Thread(target=self._work, daemon=True).start()
            except RuntimeError:  # the system has no more threads to give: those that there are do all
                self._running -= 1
                if not self._running:
                    raise

    def _work(self) -> None:
        brought = 0
        while True:
            with self._changed:
                self._count(brought)
                if not self._tasks:
                    self._wait()
                if not self._tasks or self._running > self.flight.limit:
                    self._running -= 1
                    self._wanted.notify(bool(self._tasks))  # what woke this one is for another
                    self._changed.notify_all()
                    return
                task = self._tasks.popleft()
                self._start_one()
            try:
                brought = task()
            except BaseException:  # against its word: told by the thread's hook, and not the others' trouble
                with self._changed:
                    self._running -= 1
                    self._start_one()
                    self._changed.notify_all()
                raise

    def _wait(self) -> None:
        """Called with the lock. Until there is a task, or none has come for a while."""
        self._starved = True
        if self._idle_seconds:
            self._idle += 1
            self._changed.notify_all()
            self._wanted.wait_for(lambda: self._tasks, self._idle_seconds)
            self._idle -= 1

    def _count(self, brought: int) -> None:
        """Called with the lock. A window that is over moves the number."""
        self._window_bytes += brought
        now = self._clock()
        seconds = now - self._window_began
        if seconds < _WINDOW_SECONDS:
            return
        self.flight = self.flight.after(self._window_bytes / seconds, busy=not self._starved)
        self._window_began, self._window_bytes, self._starved = now, 0, False
