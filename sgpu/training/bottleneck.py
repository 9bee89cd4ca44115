"""Says in the run's events where the time goes, when the loader comes to see it otherwise."""

from __future__ import annotations

import time
from typing import Any

from sgpu.training.session import Session

_EVERY_SECONDS = 10.0


class BottleneckWatch:
    """`look` after each step; it does nothing between its times, and nothing for loaders that report nothing."""

    def __init__(self, loader: Any, session: Session) -> None:
        self._report = getattr(loader, "report", None) if session.rank == 0 else None
        self._session = session
        self._next = time.monotonic() + _EVERY_SECONDS
        self._told = ""

    def look(self, step: int, *, at_once: bool = False) -> None:
        """`at_once`: it is the last chance."""
        if not callable(self._report) or (time.monotonic() < self._next and not at_once):
            return
        self._next = time.monotonic() + _EVERY_SECONDS
        found = self._report()
        kind = getattr(found, "kind", "unknown")
        if kind not in ("unknown", self._told):
            self._told = kind
            self._session.emit("bottleneck", step=step, bottleneck=kind, message=str(found))
