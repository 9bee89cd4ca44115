"""Something on display that has no end of its own: live while its kernel is there, and a picture when one says so."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

from sgpu.widgets.showing.view import in_notebook

Bundle = dict[str, str]


class Exhibited(Protocol):
    """A widget."""

    def widget_bundle(self) -> dict[str, Any]:
        """What displays it."""

    def close(self) -> None:
        """Frees it."""


class Exhibit:
    """Shows a widget where there are widgets, and what stays elsewhere.

    Args:
        still: the form that stays; its argument says whether with pictures, which cost half a second.
        widget: makes the widget.
    """

    def __init__(self, still: Callable[[bool], Bundle], widget: Callable[[], Exhibited]) -> None:
        self._still = still
        self._make = widget
        self._widget: Exhibited | None = None
        self._handles: list[Any] = []

    @property
    def widget(self) -> Exhibited:
        """The widget that is, or will be, on display."""
        if self._widget is None:
            self._widget = self._make()
        return self._widget

    def show(self) -> None:
        """Displays in the cell that is running; prints where there is no notebook."""
        if not in_notebook():
            print(self._still(False)["text/plain"])
            return
        from IPython.display import display  # loaded already: this is a notebook

        live = self.widget.widget_bundle() if importlib.util.find_spec("anywidget") else {}
        bundle = {**self._still(not live), **live}
        self._handles.append(display(bundle, raw=True, display_id=True))  # type: ignore[no-untyped-call]

    def keep(self) -> None:
        """Replaces every display by what stays when the kernel has gone, and frees the widget."""
        if self._handles:
            still = self._still(True)
            for handle in self._handles:
                handle.update(still, raw=True)
        self._handles.clear()
        if self._widget is not None:
            self._widget.close()
            self._widget = None
