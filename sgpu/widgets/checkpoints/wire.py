"""What travels between the checkpoints' desk and its browsers: small lists of words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sgpu.widgets.checkpoints import detail
from sgpu.widgets.checkpoints.rows import CheckpointRow, Shelf, unfinished
from sgpu.widgets.checkpoints.tensors import Line, TensorTree
from sgpu.widgets.checkpoints.values import Values
from sgpu.widgets.words import count, number, plain, plural, size

Message = dict[str, Any]


def head(shelf: Shelf, rows: Sequence[CheckpointRow]) -> Message:
    """The line above the table."""
    damaged = sum(row.state == "damaged" for row in rows)
    unchecked = sum(row.state == "unchecked" for row in rows)
    words = [plural(len(rows), "checkpoint"), f"{count(damaged)} damaged" if damaged else ""]
    words.append(f"{count(unchecked)} not looked at yet" if unchecked else "")
    total = sum(row.size_bytes or 0 for row in rows)
    words.append(size(total) if total else "")
    return {"root": shelf.place.root, "run": shelf.place.run.id if shelf.place.run else "",
            "summary": ", ".join(word for word in words if word)}  # fmt: skip


def note(shelf: Shelf) -> str:
    """Folders that were begun and never committed."""
    begun = unfinished(shelf.store, {name for row in shelf.rows for name in shelf.attempts(row.step)})
    return f"{plural(begun, 'folder')} of saves that were never completed" if begun else ""


def row(one: CheckpointRow) -> list[Any]:
    """Step, state, why, 1 if it is protected, and the cells."""
    return [one.step, one.state, one.why, int(one.protected), *detail.cells(one)]


def tree_words(tree: TensorTree) -> Message:
    return {"tensors": f"{plural(tree.tensors, 'tensor')}, {size(tree.size_bytes)}"}


def line_wire(line: Line) -> list[Any]:
    """Name, label, depth, 0: tensor, 1: closed, 2: opened group; then words."""
    shape = "" if line.shape is None else "×".join(map(str, line.shape)) or "one number"
    below = plural(line.tensors, "tensor") if line.group else shape
    shards = f"{count(line.shards)} shards" if line.shards is not None and line.shards > 1 else ""
    kind = (2 if line.opened else 1) if line.group else 0
    return [line.name, plain(line.label, 300), line.depth, kind, below, line.dtype or "", size(line.size_bytes), shards]


def values_wire(values: Values) -> Message:
    """Numbers as words, and the bins."""
    return {
        "name": values.name, "bins": list(values.bins), "low": number(values.low), "high": number(values.high),
        "words": list(values_words(values)),
    }  # fmt: skip


def values_words(values: Values) -> Iterator[str]:
    yield f"norm {number(values.norm)}"
    yield f"mean {number(values.mean)} ± {number(values.deviation)}"
    yield f"from {number(values.low)} to {number(values.high)}"
    if values.zeros:
        yield f"{plural(values.zeros, 'zero')}"
    if values.nans:
        yield f"▲ {count(values.nans)} NaN"
    if values.infinities:
        yield f"▲ {plural(values.infinities, 'infinity', 'infinities')}"
    if values.read < values.count:
        yield f"of {count(values.read)} of {count(values.count)} numbers, evenly spread"
    else:
        yield plural(values.count, "number")
    yield "bytes compared with their checksums" if values.checked else "bytes not compared with checksums"


def difference_wire(told: detail.Comparison) -> Message:
    return {
        "first": told.first, "second": told.second, "summary": told.summary,
        "groups": [[title, amount, list(found)] for title, amount, found in told.groups],
        "facts": [list(fact) for fact in told.facts],
    }  # fmt: skip
