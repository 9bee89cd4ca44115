"""A long spool at a glance: lines from all over it, until all of them are read."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

LONG_BYTES = 4 * 2**20  # a second or more of reading
_LINES = 4000  # of all ranks together
_LEAST_LINES = 20  # of one


def lines(path: pathlib.Path, size_bytes: int, spools: int) -> Iterator[dict[str, Any]]:
    """Some records, evenly spread over the file, in order, the first and the newest among them.

    What is not a whole record is passed over.

    Args:
        spools: how many are looked at: each gets its share of lines.
    """
    amount = max(_LEAST_LINES, min(_LINES // 4, _LINES // spools))
    with path.open("rb") as file:
        for at in range(amount):
            file.seek(at * size_bytes // amount)
            if at:
                file.readline()
            if (record := _record(file.readline())) is not None:
                yield record
        file.seek(max(0, size_bytes - size_bytes // amount))
        newest = [record for record in map(_record, file.readlines()[1:]) if record is not None]
        yield from newest[-1:]


def _record(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
