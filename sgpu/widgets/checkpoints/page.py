"""Checkpoints as text, and as the HTML that stays in a saved notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sgpu.checkpoint.keeping.choose import Opened
from sgpu.widgets.checkpoints import detail, wire
from sgpu.widgets.checkpoints.rows import CheckpointRow, Shelf
from sgpu.widgets.checkpoints.tensors import TensorTree, sizes_in
from sgpu.widgets.words import count, plural, size

ROWS_SHOWN = 20
_LINES_SHOWN = 40
_LEFT = 'style="text-align:left"'


def bundle(shelf: Shelf, chosen: int | None) -> dict[str, str]:
    """What a display keeps: the newest rows, and one checkpoint in full."""
    shown = shelf.rows[:ROWS_SHOWN]
    opened = {row.step: shelf.check(row.step) for row in shown if row.state == "unchecked"}
    inside = opened.get(chosen) or shelf.check(chosen) if chosen is not None else None
    return {"text/plain": _text(shelf, inside), "text/html": _page(shelf, inside)}


def _text(shelf: Shelf, inside: Opened | None) -> str:
    rows = shelf.rows
    lines = [f"{_title(shelf, rows)}"]
    if rows:
        lines += _columns(
            [["step", *detail.COLUMNS], *([count(row.step), *detail.cells(row)] for row in rows[:ROWS_SHOWN])]
        )
        lines += [f"  {count(row.step)}: {row.why}" for row in rows[:ROWS_SHOWN] if row.state == "damaged"]
    lines += [line for line in (_more(rows), wire.note(shelf)) if line]
    row = _row_of(rows, inside)
    if row is not None and inside is not None:
        lines += ["", f"step {count(row.step)}:"]
        lines += [f"  {fact.label}: {fact.value}" for fact in detail.facts(row, inside)]
        lines += [f"  {'  ' * depth}{words}" for depth, words in _tree(inside)]
    return "\n".join(lines)


def _page(shelf: Shelf, inside: Opened | None) -> str:
    rows = shelf.rows
    parts = [f'<div class="sgpu-static"><p><b>{escape(_title(shelf, rows))}</b></p>']
    if rows:
        parts.append("<table><tr>" + "".join(f"<th>{name}</th>" for name in ("step", *detail.COLUMNS)) + "</tr>")
        for one in rows[:ROWS_SHOWN]:
            cells = [count(one.step), *detail.cells(one)]
            parts.append("<tr>" + "".join(f"<td {_LEFT}>{escape(cell)}</td>" for cell in cells) + "</tr>")
            if one.state == "damaged":
                parts.append(f'<tr><td></td><td colspan="{len(cells) - 1}" {_LEFT}>✕ {escape(one.why)}</td></tr>')
        parts.append("</table>")
    parts += [f"<p>{escape(line)}</p>" for line in (_more(rows), wire.note(shelf)) if line]
    row = _row_of(rows, inside)
    if row is not None and inside is not None:
        parts.append(f"<details><summary>step {count(row.step)}</summary><table>")
        for fact in detail.facts(row, inside):
            parts.append(f"<tr><td {_LEFT}>{escape(fact.label)}</td><td {_LEFT}>{escape(fact.value)}</td></tr>")
        lines = "\n".join(f"{'  ' * depth}{words}" for depth, words in _tree(inside))
        parts.append(f'</table><pre style="font-size:12px;text-align:left">{escape(lines)}</pre></details>')
    return "".join([*parts, "</div>"])


def _title(shelf: Shelf, rows: Sequence[CheckpointRow]) -> str:
    told = wire.head(shelf, rows)
    run = f" of run {told['run']}" if told["run"] else ""
    return f"{told['summary'] or 'no checkpoint'}{run} in {told['root']}"


def _more(rows: Sequence[CheckpointRow]) -> str:
    return f"and {plural(len(rows) - ROWS_SHOWN, 'older one')}" if len(rows) > ROWS_SHOWN else ""


def _row_of(rows: Sequence[CheckpointRow], inside: Opened | None) -> CheckpointRow | None:
    return next((row for row in rows if inside is not None and row.folder == inside.folder), None)


def _tree(inside: Opened) -> list[tuple[int, str]]:
    tree = TensorTree(sizes_in(inside.index), inside.index.tensors)
    lines = tree.lines()
    found = []
    for line in lines[:_LINES_SHOWN]:
        _, label, depth, kind, below, dtype, bytes_words, shards = wire.line_wire(line)
        words = [label + ("." if kind else ""), below, dtype, bytes_words, shards]
        found.append((depth, "  ".join(word for word in words if word)))
    if len(lines) > _LINES_SHOWN:
        found.append((0, f"… {plural(tree.tensors, 'tensor')}, {size(tree.size_bytes)} in all"))
    return found


def _columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Aligned, without columns that say nothing."""
    used = [at for at in range(len(table[0])) if any(row[at] for row in table[1:])]
    table = [[row[at] for at in used] for row in table]
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
