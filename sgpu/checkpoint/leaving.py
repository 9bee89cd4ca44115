"""Checkpointers that nobody has closed: at the interpreter's end, and where the call that made them is given up."""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol


class Leaves(Protocol):
    """One that was opened and not closed."""

    def leave(self) -> None:
        """The process ends: finishes what can be, and says what was lost."""

    def let_go(self) -> None:
        """The process goes on without it: hands over what is staged, and holds nothing any more."""


_open: weakref.WeakSet[Leaves] = weakref.WeakSet()


def opened(one: Leaves) -> None:
    if not _open:
        atexit.unregister(_leave_all)
        atexit.register(_leave_all)
    _open.add(one)


def closed(one: Leaves) -> None:
    _open.discard(one)


def _leave_all() -> None:
    for each in list(_open):
        each.leave()


def let_go_all() -> None:
    for each in list(_open):
        each.let_go()
