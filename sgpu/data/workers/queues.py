"""multiprocessing's queues without their threads, where what is sent is small enough to be written at once.

Each `put` of multiprocessing's wakes a thread that pickles and writes: twice for a batch, on the way of its number to a
worker and on its own way back. That costs more than everything else that torch does for it.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import pickle
import select
from multiprocessing.context import BaseContext
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from sgpu.data.positions.streams import Envelope

if TYPE_CHECKING:
    _Queue = Queue[Any]
else:
    _Queue = Queue

_MOST_BYTES = select.PIPE_BUF - 4  # with its length in front, a pipe that is ready takes so many without waiting
_PATIENCE_SECONDS = 1.0  # a killed process may hold the lock of those that write


class DirectQueue(_Queue):
    """Writes to the pipe at once; as multiprocessing does from the first time on that this might have to wait.

    So a `put` never waits for a reader, and what one process puts stays in order. A batch that is in no slot is pickled
    by the thread as ever, beside the making of the next one.
    """

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        me: Any = self
        if me._closed or me._thread is not None or _holds_batch(obj):
            super().put(obj, block, timeout)
            return
        content = ForkingPickler.dumps(obj)
        if not self._write(content):
            super().put(_Pickled(content), block, timeout)

    def _write(self, content: Any) -> bool:
        """False: it would have to wait."""
        me: Any = self
        if len(content) > _MOST_BYTES or not me._wlock.acquire(True, _PATIENCE_SECONDS):
            return False
        try:
            if not _is_ready(me._writer.fileno()) or not me._sem.acquire(False):
                return False
            me._send_bytes(content)
            return True
        finally:
            me._wlock.release()


class _Pickled:
    """What was pickled already, and may not be again: torch makes a shared file of a tensor each time."""

    def __init__(self, content: Any) -> None:
        self._content = bytes(content)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._content,)


def _holds_batch(obj: Any) -> bool:
    return isinstance(obj, tuple) and isinstance(obj[-1], Envelope)


def _is_ready(descriptor: int) -> bool:
    asked = select.poll()
    asked.register(descriptor, select.POLLOUT)
    return bool(asked.poll(0))


def with_direct_queues(context: BaseContext | None) -> BaseContext:
    """The same way to start processes (None: the default one), with these queues."""
    found = multiprocessing.get_context() if context is None else context
    if type(found).Queue is not BaseContext.Queue:  # somebody's own
        return found
    made = copy.copy(found)
    queue: Any = functools.partial(DirectQueue, ctx=found)
    made.Queue = lambda maxsize=0: queue(maxsize)  # type: ignore[method-assign]
    return made
