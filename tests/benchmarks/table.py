"""Rows of figures as an aligned table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints one line a row; columns are the keys in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    texts = [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [columns, *texts]) for i in range(len(columns))]
    for line in [columns, *texts]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
