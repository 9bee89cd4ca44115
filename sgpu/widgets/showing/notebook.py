"""A notebook's display as a screen: live as a widget, static at the end.

At the end the display is replaced by an image, HTML and text *without* the widget: a notebook that is opened without
its kernel shows "model not found" wherever a widget stands, and passes over everything beside it.
"""

from __future__ import annotations

from typing import Any, Protocol

from IPython.display import display

from sgpu.contract.clock import Clock, SystemClock
from sgpu.widgets.follow import Pacer
from sgpu.widgets.reading.snapshot import Snapshot
from sgpu.widgets.showing import html

_STATIC_SECONDS = 2.0  # how often a display without a widget is replaced


class LiveWidget(Protocol):
    """`live_bundle` once, `push` any number of times, `close` once the display no longer holds it."""

    def live_bundle(self) -> dict[str, Any]:
        """What displays the widget."""

    def push(self, snapshot: Snapshot) -> None:
        """Shows what is new."""

    def close(self) -> None:
        """Frees the widget."""


class NotebookScreen:
    """Displays at once, in the cell that is running.

    Args:
        snapshot: the first.
        widget: None: text and HTML are replaced every two seconds.
    """

    def __init__(self, snapshot: Snapshot, *, widget: LiveWidget | None = None, clock: Clock | None = None) -> None:
        self._widget = widget
        self._pacer = Pacer(clock or SystemClock(), _STATIC_SECONDS)
        first = html.bundle(snapshot, charts=False) if widget is None else widget.live_bundle()
        self._handle: Any = display(  # type: ignore[no-untyped-call]
            first, raw=True, display_id=True
        )

    def show(self, snapshot: Snapshot) -> None:
        if self._widget is not None:
            self._widget.push(snapshot)
        elif self._pacer.due():
            self._handle.update(html.bundle(snapshot, charts=False), raw=True)

    def finish(self, snapshot: Snapshot) -> None:
        if self._widget is not None:
            self._widget.push(snapshot)
        self._handle.update(html.bundle(snapshot), raw=True)
        if self._widget is not None:
            self._widget.close()
