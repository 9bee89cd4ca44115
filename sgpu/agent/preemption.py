"""Whether this node is to be given back: by a signal, or by what a notice source says."""

from __future__ import annotations

import signal
import threading
import time

from sgpu.agent.notices import Notice, NoticeSource


class Watch:
    """Looks at a notice source on a thread of its own, so that no answer that is late holds anybody up.

    Order of calls: `start`, then `notice` whenever it is wanted. A source that has never answered is asked
    `_ATTEMPTS` times and then no more.
    """

    _ATTEMPTS = 3

    def __init__(self, source: NoticeSource) -> None:
        self._source, self._stop = source, threading.Event()
        self.notice: Notice | None = None
        self._thread = threading.Thread(target=self._look, name="sgpu-notices", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        answered, failed = False, 0
        while self.notice is None and (answered or failed < self._ATTEMPTS):
            try:
                self.notice = self._source.look()
                answered = True
            except OSError:
                failed += 1
            if self._stop.wait(self._source.every_seconds):
                return


class Preemption:
    """Asked each turn. SIGTERM and SIGUSR1 count from when they came; the first notice stays."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt of the notebook arrives as a cancel
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def _note(self, number: int, _frame: object) -> None:
        self._signal = self._signal or number

    def __call__(self) -> Notice | None:
        if self._signal is not None:
            return Notice(cause=signal.Signals(self._signal).name)
        return self._watch.notice if self._watch is not None else None


def grace_seconds(notice: Notice | None, usual_seconds: float, *, reserve_seconds: float = 2.0) -> float:
    """How long the ranks may take: up to what the notice says, less what the agent needs itself; else the usual."""
    if notice is None or notice.deadline is None:
        return usual_seconds
    return max(0.0, notice.deadline - time.time() - reserve_seconds)
