"""Where runs and plans are shown: plain data first, then text, static HTML, a widget.

Names only: the widgets need anywidget, and nothing else here does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgpu.widgets.checkpoint_browser import CheckpointBrowser
    from sgpu.widgets.feed import Feed
    from sgpu.widgets.planner import GoodputPlanner
    from sgpu.widgets.planner_model import PlannerState, PlannerView
    from sgpu.widgets.run_view import RunView
    from sgpu.widgets.snapshot import Snapshot
    from sgpu.widgets.text import TextView, render
    from sgpu.widgets.view import View, show

_HOME = {
    "CheckpointBrowser": "checkpoint_browser",
    "Feed": "feed",
    "GoodputPlanner": "planner",
    "PlannerState": "planner_model",
    "PlannerView": "planner_model",
    "RunView": "run_view",
    "Snapshot": "snapshot",
    "TextView": "text",
    "View": "view",
    "render": "text",
    "show": "view",
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
