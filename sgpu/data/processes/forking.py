"""What a fork copies and must not: locks that another thread holds, connections, garbage collections.

Python makes logging's locks anew in a child, but not those of the streams behind them. So no thread may be writing a
record at the moment of the fork: this process holds all handlers while its workers start.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

_FROZEN_AT_START = 2000  # objects at most: Python 3.12 itself begins with some hundred; with torch there are 100,000
_PATIENCE_SECONDS = 1.0  # a handler that hangs must not keep workers from starting

_starting = threading.local()
_held: list[logging.Handler] = []


class BeginsAnew(Protocol):
    """Has locks, or what else belongs to one process."""

    def begin_anew(self) -> None:
        """In the child of a fork: what is the parent's is not used here."""


_owners: weakref.WeakSet[BeginsAnew] = weakref.WeakSet()


def anew_in_forks(owner: BeginsAnew) -> None:
    """It begins anew in each child, as long as it lives."""
    _owners.add(owner)


@contextlib.contextmanager
def handlers_held_at_forks() -> Iterator[None]:
    """Within it, each fork of this thread waits until no log record is being written."""
    _starting.now = True
    try:
        yield
    finally:
        _starting.now = False


@contextlib.contextmanager
def objects_frozen() -> Iterator[None]:
    """Garbage collections leave out what there was before, within it and in processes that are forked within it.

    A collection would go over all that torch has made, 0.05 s each time, and what makes many objects causes several. In
    a forked worker one would copy it all: 0.1 s and 40 MB, and when it comes is chance, mostly before the first batch.
    """
    if gc.get_freeze_count() > _FROZEN_AT_START:  # the user's own choice
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _handlers() -> list[logging.Handler]:
    loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
    found = {id(h): h for logger in loggers if isinstance(logger, logging.Logger) for h in list(logger.handlers)}
    return list(found.values())


def _hold() -> None:
    if getattr(_starting, "now", False):
        _held.extend(h for h in _handlers() if h.lock is not None and h.lock.acquire(timeout=_PATIENCE_SECONDS))


def _let_go() -> None:
    while _held:
        lock = _held.pop().lock
        if lock is not None:
            lock.release()


def _in_child() -> None:
    _held.clear()  # logging makes its locks anew; there is nothing to release
    for owner in list(_owners):
        owner.begin_anew()


os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_in_child)
