"""Where runs and plans are shown: plain data first, then text, static HTML, a widget.

Names only: the widgets need anywidget, and nothing else here does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgpu.widgets.checkpoints.browser import CheckpointBrowser
    from sgpu.widgets.planning.model import PlannerState, PlannerView
    from sgpu.widgets.planning.planner import GoodputPlanner
    from sgpu.widgets.reading.feed import Feed
    from sgpu.widgets.reading.snapshot import Snapshot
    from sgpu.widgets.showing.run_view import RunView
    from sgpu.widgets.showing.text import TextView, render
    from sgpu.widgets.showing.view import View, show

_HOME = {
    "CheckpointBrowser": "checkpoints.browser",
    "Feed": "reading.feed",
    "GoodputPlanner": "planning.planner",
    "PlannerState": "planning.model",
    "PlannerView": "planning.model",
    "RunView": "showing.run_view",
    "Snapshot": "reading.snapshot",
    "TextView": "showing.text",
    "View": "showing.view",
    "render": "showing.text",
    "show": "showing.view",
}

__all__ = [
    "CheckpointBrowser", "Feed", "GoodputPlanner", "PlannerState", "PlannerView", "RunView", "Snapshot", "TextView",
    "View", "render", "show",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sgpu.widgets' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sgpu.widgets.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
