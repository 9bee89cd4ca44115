"""The agent's word to a worker: give up the call of this generation; begin anew as another; answer.

It comes over a pipe that a thread of its own reads, which answers as long as it gets the interpreter's lock. Giving up:
what waits for other ranks is freed (see abort.py), and `Restart` is raised in the main thread by a real signal, which
also ends system calls. Not in the middle of an import, which would poison the module for good, nor in a shielded
section: then the signal comes again.
"""

from __future__ import annotations

import json
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from sgpu.contract.heartbeat import Slot
from sgpu.contract.process import LISTENER, name_this_thread
from sgpu.contract.shield import is_shielded
from sgpu.worker.abort import Abort

SIGNAL = signal.SIGRTMIN + 7
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 0.2
_AGAIN_SECONDS = 0.5  # what clears up after the first `Restart` gets so long before the next

_Value = TypeVar("_Value")


class Restart(BaseException):
    """The call is given up. No Exception: a user's `except Exception` must not stop it."""


class Control:
    """Order of calls, in the main thread: per generation `begin`, `call`, `out`, and where it gave no result `next`.

    Args:
        generation: the first one.
        descriptor: the pipe's reading end.
        abort: frees whoever is stuck in a collective.
        leave: called where this generation's call has ended well, and its result is not wanted any more.
    """

    def __init__(self, descriptor: int, generation: int, *, abort: Abort, leave: Callable[[], None]) -> None:
        self._generation = generation
        self._abort, self._leave = abort, leave
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._out = threading.Event()
        self._inside = self._over = self._done = False
        self._slot: Slot | None = None
        self._raised_at = float("-inf")
        self._main = threading.main_thread().ident or 0
        signal.signal(SIGNAL, self._handle)
        _listen(descriptor, self._take, self._at_end)

    def begin(self, slot: Slot) -> None:
        """There it is told, from another thread, that the agent's word is here: that a generation is given up, or a
        question whether this process hears. One whose call holds the interpreter's lock does not.
        """
        self._slot = slot
        if self._over:
            slot.hear(self._generation)

    def call(self, function: Callable[[], _Value]) -> _Value:
        """The user's function; raises Restart where the agent has given this generation up."""
        self._out.clear()
        self._raised_at = float("-inf")
        try:
            self._inside = True
            if self._over:
                raise Restart
            return function()
        finally:
            self._inside = False

    @property
    def over(self) -> bool:
        """Whether the agent has given this generation up."""
        return self._over

    def out(self, *, done: bool) -> None:
        """The call has ended; `done`: with a result, after which the process leaves."""
        self._inside, self._done = False, done
        self._out.set()
        if done and self._over:
            self._leave()

    def next(self) -> dict[str, Any] | None:
        """Waits for what to begin anew as: rank, generation, environment, log. None: the agent is gone."""
        return self._commands.get()

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._inside or not self._over or now - self._raised_at < _AGAIN_SECONDS:
            return
        if is_shielded() or _imports(frame):
            return
        self._raised_at = now
        raise Restart

    def _take(self, message: dict[str, Any]) -> None:
        if message["op"] == "answer":
            if self._slot is not None:
                self._slot.answer()
        elif message["op"] == "interrupt":
            self._interrupt(message["generation"])
        else:  # what is said of the new generation from here on counts, also before its call begins
            self._generation, self._over = message["generation"], False
            self._commands.put(message)

    def _at_end(self) -> None:
        self._commands.put(None)

    def _interrupt(self, generation: int) -> None:
        if generation != self._generation:
            return
        self._over = True
        if self._slot is not None:
            self._slot.hear(generation)
        if self._done:
            self._leave()
        pause = _FIRST_PAUSE_SECONDS
        while not self._out.is_set():
            self._abort.abort()
            signal.pthread_kill(self._main, SIGNAL)
            self._out.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def answer_only(descriptor: int, slot: Slot) -> None:
    """For a process that is for one generation: it hears, and that is all."""
    _listen(descriptor, lambda message: slot.answer() if message["op"] == "answer" else None, lambda: None)


def _listen(descriptor: int, take: Callable[[dict[str, Any]], None], at_end: Callable[[], None]) -> None:
    def listen() -> None:
        name_this_thread(LISTENER)
        with open(descriptor, "rb") as lines:
            for line in lines:
                take(json.loads(line))
        at_end()

    threading.Thread(target=listen, daemon=True, name=LISTENER).start()


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported somewhere up the stack."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
