"""A plan in the form that stays in a saved notebook: text, a table, a picture."""

from __future__ import annotations

import base64
import importlib.util
import io
from html import escape

from sgpu.widgets.planning import text as words
from sgpu.widgets.planning.model import PlannerState, PlannerView, Preset

_LINE, _MARK, _CHOSEN, _BAND, _GRID = "#2563eb", "#047857", "#b45309", "#2563eb33", "#8884"


def bundle(
    state: PlannerState, view: PlannerView, measured: Preset | None = None, *, charts: bool = True
) -> dict[str, str]:
    """What a display keeps; the picture only where matplotlib is installed."""
    picture = charts_png(state, view) if charts and importlib.util.find_spec("matplotlib") else None
    kept = {"text/plain": words.render(state, view, measured), "text/html": page(state, view, measured, picture)}
    if picture is not None:
        kept["image/png"] = base64.b64encode(picture).decode()
    return kept


def page(state: PlannerState, view: PlannerView, measured: Preset | None, picture: bytes | None) -> str:
    parts = [f'<div class="sgpu-static"><p><b>{escape(words.title(state))}</b></p>']
    parts.append(f"<p>failure rate: {escape(words.rate_words(state, measured))}</p><table>")
    for figure in words.figures(state, view):
        cells = f"<td>{escape(figure.label)}</td><td><b>{escape(figure.value)}</b></td>"
        parts.append(f'<tr>{cells}<td style="text-align:left">{escape(figure.note)}</td></tr>')
    parts.append("</table>")
    if picture is not None:
        encoded = base64.b64encode(picture).decode()
        alt = "charts: goodput against checkpoint interval; expected failures over the days"
        parts.append(f'<img alt="{alt}" src="data:image/png;base64,{encoded}">')
    parts.append("<table><tr><th>would win</th><th>change</th></tr>")
    for knob in view.knobs:
        cells = f'<td>{words.points(knob.gain)}</td><td style="text-align:left">{escape(knob.change)}</td>'
        parts.append(f"<tr>{cells}</tr>")
    parts.append("</table>")
    parts += [f"<p>{escape(remark)}</p>" for remark in (*words.remarks(state, view), words.ASSUMED)]
    return "".join([*parts, "</div>"])


def charts_png(state: PlannerState, view: PlannerView) -> bytes:
    # Takes half a second to import: only where a picture is wanted.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 2.9), dpi=90, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.semilogx([at / 60 for at, _ in view.curve], [share * 100 for _, share in view.curve], color=_LINE)
    left.axvline(view.best_interval_seconds / 60, color=_MARK, linestyle="--", linewidth=1)
    label = f"best: {words.duration(view.best_interval_seconds)}"
    left.plot([view.best_interval_seconds / 60], [view.best_goodput * 100], "^", color=_MARK, label=label)
    if state.interval_seconds is not None:
        label = f"chosen: {words.duration(view.interval_seconds)}"
        left.plot([view.interval_seconds / 60], [view.goodput * 100], "o", color=_CHOSEN, label=label)
    left.legend(fontsize=7, frameon=False)
    left.set_title("goodput (%) against minutes between checkpoints", fontsize=9, loc="left")
    days = [day for day, *_ in view.spread]
    right.plot(days, [mean for _, mean, _, _ in view.spread], color=_LINE)
    right.fill_between(days, [low for *_, low, _ in view.spread], [high for *_, high in view.spread], color=_BAND, lw=0)
    right.set_title("failures over the days; the band holds 9 cases of 10", fontsize=9, loc="left")
    for axes in (left, right):
        axes.tick_params(labelsize=7)
        axes.grid(color=_GRID, linewidth=0.5)
        axes.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()
