"""Time that passes only when it is told to."""

from __future__ import annotations

import time


class FakeClock:
    """A `Clock` whose sleeps are instant. It starts at the machine's own time, to be held against heartbeats."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._monotonic, self._wall = time.monotonic(), time.time()

    def monotonic(self) -> float:
        return self._monotonic + self._passed

    def wall(self) -> float:
        return self._wall + self._passed

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Lets `seconds` (0 or more) pass."""
        self._passed += max(0.0, seconds)
