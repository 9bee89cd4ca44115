"""Time as an argument, so that policies and loops are tested without waiting."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """`monotonic` orders and measures (shared by all processes of a machine); `wall` is for people."""

    def monotonic(self) -> float:
        """Seconds; only differences mean anything."""

    def wall(self) -> float:
        """Seconds since 1970, UTC."""

    def sleep(self, seconds: float) -> None:
        """Waits."""


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
