"""A snapshot as static HTML, and as the bundle that stays in a saved notebook.

Only what survives a notebook's sanitizer, GitHub and nbconvert: tables, inline styles, `<img src="data:...">`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape

from sgpu.widgets.reading.machines import machine_line
from sgpu.widgets.reading.snapshot import Failure, Goodput, Snapshot
from sgpu.widgets.reading.usage import LABELS
from sgpu.widgets.showing import text
from sgpu.widgets.showing.picture import charts_png
from sgpu.widgets.words import count, plain, plural, size

PART_COLOURS = {
    "productive": "#059669",
    "data": "#d97706",
    "checkpoint": "#2563eb",
    "restart": "#dc2626",
    "recomputing": "#9333ea",
    "starting": "#6b7280",
    "other": "#9ca3af",
}
_HAPPENINGS_SHOWN = 20
_LOG_LINES_SHOWN = 20
_METRICS_SHOWN = 50
_PRE = 'style="white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0;font-size:12px;text-align:left"'


def bundle(snapshot: Snapshot, *, charts: bool = True) -> dict[str, str]:
    """What a display keeps: text, HTML, and a PNG where there are metrics and matplotlib."""
    picture = charts_png(snapshot) if charts else None
    kept = {"text/plain": text.render(snapshot), "text/html": page(snapshot, picture)}
    if picture is not None:
        kept["image/png"] = base64.b64encode(picture).decode()
    return kept


def page(snapshot: Snapshot, picture: bytes | None = None) -> str:
    """The snapshot as HTML; everything that came from the run is escaped."""
    return f'<div class="sgpu-static">{"".join(_sections(snapshot, picture))}</div>'


def _sections(snapshot: Snapshot, picture: bytes | None) -> Iterator[str]:
    yield f"<p><b>{escape(text.headline(snapshot))}</b>"
    if words := text.progress(snapshot):
        yield f"<br>{escape(words)}"
    yield "</p>"
    if snapshot.failure is not None:
        yield from _failure(snapshot.failure, snapshot.id)
    if snapshot.goodput is not None:
        yield from _goodput(snapshot.goodput)
    if snapshot.machines:
        yield f"<p>{'<br>'.join(escape(machine_line(machine)) for machine in snapshot.machines)}</p>"
    if picture is not None:
        encoded = base64.b64encode(picture).decode()
        yield f'<img alt="charts of the metrics over steps" src="data:image/png;base64,{encoded}">'
    yield from _metrics(snapshot, folded=picture is not None)
    yield from _usage(snapshot)
    yield from _happenings(snapshot)
    for log in snapshot.logs[:1]:
        lines = escape("\n".join(log.lines[-_LOG_LINES_SHOWN:]))
        title = f"log of rank {log.rank}: the end of {escape(log.path)} ({size(log.size_bytes)})"
        yield f"<details{_open(snapshot)}><summary>{title}</summary><pre {_PRE}>{lines}</pre></details>"
    if snapshot.tracking is not None:
        yield f"<p>MLflow: {_link(snapshot.tracking.url) or f'<code>{escape(snapshot.tracking.command)}</code>'}</p>"
    if snapshot.note:
        yield f"<p>{escape(snapshot.note)}</p>"
    yield f"<p>folder: <code>{escape(snapshot.folder)}</code></p>"


def _open(snapshot: Snapshot) -> str:
    return " open" if snapshot.failure is not None else ""


def _failure(failure: Failure, run_id: str) -> Iterator[str]:
    first, *rest = text.failure_lines(failure, run_id)
    yield '<div style="border-left:4px solid #dc2626;padding:2px 10px;margin:6px 0">'
    yield f"<b>✕ {escape(first)}</b>"
    if failure.traceback.strip():
        yield f"<pre {_PRE}>{escape(failure.traceback.rstrip())}</pre>"
    yield f"<div>{escape(rest[-1])}</div></div>"


def _goodput(goodput: Goodput) -> Iterator[str]:
    parts = [part for part in goodput.parts if part.share >= 0.0005]
    yield f"<p>{escape(goodput.sentence)}</p>"
    yield '<div style="display:flex;height:10px;max-width:720px;overflow:hidden;border-radius:3px">'
    for part in parts:
        width = f"width:{part.share * 100:.2f}%"
        yield f'<div title="{escape(part.label)}" style="{width};background:{PART_COLOURS[part.name]}"></div>'
    yield "</div><p>" + escape(text.goodput_lines(goodput)[1].strip()) + "</p>"
    if goodput.advice:
        yield f"<p>▲ {escape(goodput.advice)}</p>"


def _metrics(snapshot: Snapshot, *, folded: bool) -> Iterator[str]:
    own = [series for series in snapshot.series.values() if series.rank == 0]
    if not own:
        return
    more = f" (the first {_METRICS_SHOWN} of {count(len(own))})" if len(own) > _METRICS_SHOWN else ""
    yield f"<details{'' if folded else ' open'}><summary>metrics of rank 0{more}</summary><table>"
    yield "<tr><th>metric</th><th>last value</th><th>at step</th><th>values</th><th>note</th></tr>"
    for series in own[:_METRICS_SHOWN]:
        cells = (plain(series.name, 120), series.latest, count(series.steps[-1]), count(series.logged), series.note)
        yield "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
    yield "</table></details>"


def _usage(snapshot: Snapshot) -> Iterator[str]:
    """A table of nodes and one of ranks: the last values and the highest."""
    if not snapshot.usage:
        return
    yield "<details><summary>machines: the last figures, and the highest</summary>"
    for what in ("node", "rank"):
        rows: dict[int, dict[str, str]] = {}
        for one in snapshot.usage:
            if (one.rank is None) == (what == "node"):
                cell = f"{escape(one.now)}<br>{escape(one.highest)}"
                rows.setdefault(one.node if one.rank is None else one.rank, {})[one.label] = cell
        labels = [label for label in LABELS if any(label in cells for cells in rows.values())]
        if rows:
            yield f"<table><tr><th>{what}</th>{''.join(f'<th>{label}</th>' for label in labels)}</tr>"
            for place, cells in list(rows.items())[:_METRICS_SHOWN]:
                told = "".join(f"<td>{cells.get(label, '')}</td>" for label in labels)
                yield f"<tr><td>{place}</td>{told}</tr>"
            yield "</table>"
            if len(rows) > _METRICS_SHOWN:
                yield f"<p>… and {plural(len(rows) - _METRICS_SHOWN, f'more {what}')}</p>"
    yield "</details>"


def _happenings(snapshot: Snapshot) -> Iterator[str]:
    shown = [happening for happening in snapshot.happenings if happening.level != "detail"]
    if not shown:
        return
    before = len(shown[:-_HAPPENINGS_SHOWN]) + snapshot.earlier_happenings
    more = f" (the newest {_HAPPENINGS_SHOWN}; {count(before)} more in events.jsonl)" if before else ""
    yield f"<details{_open(snapshot)}><summary>events{more}</summary><table>"
    for happening in shown[-_HAPPENINGS_SHOWN:]:
        when = text.stamp(snapshot, happening)
        yield f'<tr><td>{when}</td><td style="text-align:left">{escape(happening.sentence)}</td></tr>'
    yield "</table></details>"


def _link(url: str) -> str:
    """Only pages: a `javascript:` address in a run folder must not become a link."""
    return f'<a href="{escape(url)}">{escape(url)}</a>' if url.startswith(("http://", "https://")) else ""
