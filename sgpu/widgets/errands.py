"""Work that takes a while, done one after the other in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

Errand = Callable[[], None]


class Errands(Protocol):
    """`do` any number of times, `close` once."""

    def do(self, errand: Errand) -> None:
        """Later, after those that were asked for before."""

    def close(self) -> None:
        """Forgets what has not begun."""


class BackgroundErrands:
    """A daemon thread, started by the first errand: a long check must not hold up the end of a kernel.

    Args:
        trouble: hears what an errand raised; the next one is done all the same.
    """

    def __init__(self, name: str, trouble: Callable[[Exception], None]) -> None:
        self._name = name
        self._trouble = trouble
        self._waiting: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def do(self, errand: Errand) -> None:
        with self._lock:
            if self._closed:
                return
            self._waiting.put(errand)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._waiting.put(None)

    def _work(self) -> None:
        while (errand := self._waiting.get()) is not None:
            if self._closed:
                continue
            try:
                errand()
            except Exception as error:  # noqa: BLE001 - stores raise what their packages please; it is told
                self._trouble(error)
