"""The charts of a snapshot as one PNG, for displays that run no JavaScript."""

from __future__ import annotations

import importlib.util
import io
import math
from typing import TYPE_CHECKING, Any

from sgpu.widgets.reading.snapshot import Mark, Series, Snapshot
from sgpu.widgets.words import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_CHARTS = 9
_COLUMNS = 3
_LINE, _RESTART, _FAILURE, _CHECKPOINT, _GRID = "#2563eb", "#b45309", "#dc2626", "#059669", "#8884"


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def charts_png(snapshot: Snapshot) -> bytes | None:
    """None where matplotlib is not installed or there is nothing to draw."""
    chosen = [series for series in snapshot.series.values() if series.rank == 0 and series.steps][:MAX_CHARTS]
    if not chosen or not available():
        return None
    # Takes half a second to import: only when a run with metrics has ended.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(_COLUMNS, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.3 * rows), dpi=90, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    places = list(grid.flat)
    for axes, series in zip(places, chosen, strict=False):
        _draw(axes, series, snapshot.marks)
    for axes in places[len(chosen) :]:
        axes.set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _draw(axes: Axes, series: Series, marks: tuple[Mark, ...]) -> None:
    values = [math.nan if value is None else value for value in series.values]
    dots = "." if len(values) < 3 else None
    axes.plot(series.steps, values, color=_LINE, linewidth=1.3, marker=dots)
    axes.set_title(f"{_drawable(series.name)}: {series.latest}", fontsize=9, loc="left", parse_math=False)
    axes.tick_params(labelsize=7)
    axes.grid(color=_GRID, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    for mark in marks:
        if not series.steps[0] <= mark.step <= series.steps[-1]:
            continue
        if mark.kind == "checkpoint":
            axes.plot(
                [mark.step],
                [0],
                "^",
                color=_CHECKPOINT,
                markersize=4,
                clip_on=False,
                transform=axes.get_xaxis_transform(),
            )
        else:
            color, style = (_FAILURE, ":") if mark.kind == "failure" else (_RESTART, "--")
            axes.axvline(mark.step, color=color, linestyle=style, linewidth=1)


def _drawable(name: str) -> str:
    """The font knows Latin, Greek and Cyrillic; the table beside the picture has the true name."""
    return "".join(character if ord(character) < 0x500 else "?" for character in plain(name, 40))
