"""Text and JSON, a sample a line."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

from sgpu.contract.errors import InputError
from sgpu.data.dataset import VolumeDataset
from sgpu.data.formats.base import ManyDataset, Transform, told


class TextLines(ManyDataset):
    """Each line of each file is a sample, without its end. Files that end in ".gz" are unpacked as they are read.

    Args:
        files: a volume, or its path or URL (then: "*.txt" and "*.txt.gz").
        encoding: of the files; a byte that is none of it is told with file and line.

    Raises:
        DataError: while iterating: a file cannot be read or decoded, with its path and line.
    """

    kind = "text"
    pattern = "**/*.{txt,txt.gz}"
    damage = (OSError, ValueError, EOFError, zlib.error)

    def __init__(
        self,
        files: VolumeDataset | str | os.PathLike[str],
        *,
        encoding: str = "utf-8",
        transform: Transform | None = None,
    ) -> None:
        try:
            "".encode(encoding)
        except LookupError as problem:
            raise InputError(f"encoding {encoding!r} is unknown; name one of Python's, as 'utf-8'") from problem
        super().__init__(files, transform)
        self.encoding = encoding

    def samples(self, path: str) -> Iterator[Any]:
        with gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    yield self.parsed(line.rstrip(b"\r\n").decode(self.encoding))
                except ValueError as problem:
                    raise told(f"line {number}: {problem}") from problem

    def parsed(self, line: str) -> Any:
        """The sample in a line."""
        return line


class JsonLines(TextLines):
    """Each line is a JSON value of its own.

    Args:
        files: a volume, or its path or URL (then: "*.jsonl", "*.ndjson", and the same with ".gz").
        transform: of each value.

    Raises:
        DataError: while iterating: a line is no JSON (a file that was cut, often the last), with path and line.
    """

    kind = "JSON lines"
    pattern = "**/*.{jsonl,ndjson,jsonl.gz,ndjson.gz}"

    def parsed(self, line: str) -> Any:
        return json.loads(line)
