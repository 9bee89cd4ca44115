"""Append-only files of one JSON object a line, written by several processes, readable while they grow."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


def append(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Adds one line with a single O_APPEND write, so that lines of several processes never mix."""
    append_lines(path, [record])


def append_lines(path: pathlib.Path, lines: list[Mapping[str, Any]]) -> None:
    content = "".join(json.dumps(record, default=str) + "\n" for record in lines).encode()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        if _torn(descriptor):
            content = b"\n" + content
        while content:
            content = content[os.write(descriptor, content) :]
    finally:
        os.close(descriptor)


def _torn(descriptor: int) -> bool:
    """Whether the last line has no end: its writer was killed, and what follows must not become part of it."""
    size_bytes = os.fstat(descriptor).st_size
    return size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One record and the byte offset just behind it (where to go on reading)."""

    record: dict[str, Any]
    next_offset: int


def read_from(path: pathlib.Path, offset: int = 0) -> Iterator[Line]:
    """Whole lines from `offset` on. A torn last line (its writer was killed) waits; a broken one is passed over.

    NaN and infinities are kept as Python's json writes them.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for raw in file:
            if not raw.endswith(b"\n"):
                return
            offset += len(raw)
            try:
                record = json.loads(raw)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield Line(record=record, next_offset=offset)


def read_all(path: pathlib.Path) -> list[dict[str, Any]]:
    return [line.record for line in read_from(path)]
