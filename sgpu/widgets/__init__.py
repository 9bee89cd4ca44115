"""Where a run is shown: feed (run folder to plain Snapshot), text, static HTML, widget.

Names only: the widget needs anywidget, and nothing else here does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgpu.widgets.feed import Feed
    from sgpu.widgets.run_view import RunView
    from sgpu.widgets.snapshot import Snapshot
    from sgpu.widgets.text import TextView, render
    from sgpu.widgets.view import View, show

_HOME = {
    "Feed": "feed",
    "RunView": "run_view",
    "Snapshot": "snapshot",
    "TextView": "text",
    "View": "view",
    "render": "text",
    "show": "view",
}

__all__ = ["Feed", "RunView", "Snapshot", "TextView", "View", "render", "show"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sgpu.widgets' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sgpu.widgets.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
