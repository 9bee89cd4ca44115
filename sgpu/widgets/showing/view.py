"""Which view a run gets: a widget in a notebook, lines of text elsewhere."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from sgpu.contract.clock import Clock, SystemClock
from sgpu.contract.rundir import RunDir
from sgpu.widgets.follow import INTERVAL_SECONDS, Follower, Pacer
from sgpu.widgets.reading.feed import Feed
from sgpu.widgets.reading.snapshot import Snapshot
from sgpu.widgets.showing.text import TextView


class View(Protocol):
    """A run on display. Either call `refresh` in a loop and `finish` at the end, or `start` once."""

    def refresh(self) -> None:
        """Shows what is new; may be called as often as one likes."""

    def finish(self) -> None:
        """Shows the last state, in the form that stays. Later calls do nothing."""

    def start(self) -> None:
        """Refreshes in the background until the run is final, then finishes."""

    def wait_final(self, timeout_seconds: float | None = None) -> bool:
        """Whether the last state was shown within the time."""

    def close(self) -> None:
        """Finishes now, whatever the run does."""


class Screen(Protocol):
    """What snapshots are drawn on: `show` any number of times, then `finish` once."""

    def show(self, snapshot: Snapshot) -> None:
        """Draws what is new."""

    def finish(self, snapshot: Snapshot) -> None:
        """Draws the form that stays."""


class LiveView:
    """Draws a feed on a screen; a View. Calls may come from several threads.

    Whatever goes wrong in reading or drawing is told once, and tried again: no run must end for it.
    """

    def __init__(self, feed: Feed, screen: Screen, *, clock: Clock | None = None) -> None:
        self._feed = feed
        self._screen = screen
        self._pacer = Pacer(clock or SystemClock(), INTERVAL_SECONDS)
        self._lock = threading.RLock()
        self._done = threading.Event()
        self._follower: Follower | None = None
        self._trouble = ""

    def refresh(self) -> None:
        with self._lock:
            if not self._done.is_set() and self._pacer.due():
                self._guarded(lambda: self._screen.show(self._feed.snapshot()))

    def finish(self) -> None:
        with self._lock:
            if self._done.is_set():
                return
            try:
                self._guarded(self._draw_last)
            finally:
                self._feed.close()
                self._done.set()

    def start(self) -> None:
        if self._follower is None:
            self._follower = Follower(self._step)
            self._follower.start()

    def wait_final(self, timeout_seconds: float | None = None) -> bool:
        return self._done.wait(timeout_seconds)

    def close(self) -> None:
        if self._follower is not None:
            self._follower.stop()
        self.finish()

    def _step(self) -> bool:
        with self._lock:
            if not self._done.is_set():
                self._guarded(self._draw_next)
            return self._done.is_set()

    def _draw_next(self) -> None:
        snapshot = self._feed.snapshot()
        if snapshot.final:
            self.finish()
        else:
            self._screen.show(snapshot)

    def _draw_last(self) -> None:
        snapshot = self._feed.snapshot()
        while snapshot.behind:
            snapshot = self._feed.snapshot()
        self._screen.finish(snapshot)

    def _guarded(self, draw: Callable[[], None]) -> None:
        try:
            draw()
        except Exception as error:  # noqa: BLE001 - the observer cannot hurt the run
            trouble = f"{type(error).__name__}: {error}"
            if trouble != self._trouble:
                self._trouble = trouble
                name = self._feed.run.id
                sys.stderr.write(f"sgpu: the live view of {name} has a problem; the run goes on. {trouble}\n")


def show(run_dir: RunDir, on_stop: Callable[[], None]) -> View:
    """Displays a run that was started.

    Args:
        run_dir: its folder.
        on_stop: called, in some thread, when the user asks that the run be stopped.

    Raises:
        SgpuError: there is no run in that folder.
    """
    if not in_notebook():
        return LiveView(Feed(run_dir), TextView(sys.stdout))
    # UI packages take a second to import, and may be missing.
    from sgpu.widgets.showing.notebook import NotebookScreen

    if importlib.util.find_spec("anywidget") is None:
        feed = Feed(run_dir)
        return LiveView(feed, NotebookScreen(feed.snapshot()))
    from sgpu.widgets.showing.run_view import RunView

    widget = RunView(run_dir, on_stop=on_stop)
    return LiveView(widget.feed, NotebookScreen(widget.feed.snapshot(), widget=widget))


def in_notebook() -> bool:
    """Whether this is a kernel with a front end. Looks only at what is loaded already."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None
