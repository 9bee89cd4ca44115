"""Starting workers by fork while other threads log: a copied lock that somebody held would stay held for ever.

Python makes logging's locks anew in a child, but not those of the streams behind them. So no thread may be writing a
record at the moment of the fork: this process holds all handlers while its workers start.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
from collections.abc import Iterator

_PATIENCE_SECONDS = 1.0  # a handler that hangs must not keep workers from starting

_starting = threading.local()
_held: list[logging.Handler] = []


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
    if gc.get_freeze_count():  # the user's own choice
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


# in the child logging makes the locks anew; there is nothing to release
os.register_at_fork(before=_hold, after_in_parent=_let_go, after_in_child=_held.clear)
