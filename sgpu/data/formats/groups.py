"""How a table's files divide into row groups, from the ends of the files alone; worked out once a node."""

from __future__ import annotations

import io
import pathlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgpu.contract import atomic
from sgpu.contract.errors import DataError, VolumeError
from sgpu.data.formats.optional import optional
from sgpu.data.source import Source
from sgpu.data.volumes.entry import Entry, Volume

_THREADS = 32
_UNKNOWN_ROWS = -1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Row groups of all files, numbered file by file.

    Attributes:
        starts: int64 [files + 1]: the number of each file's first group.
        counts: int64 [groups]: rows of each; -1 where the file does not tell.
        columns: names, of the first file.
    """

    starts: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def rows(self) -> int | None:
        return None if (self.counts < 0).any() else int(self.counts.sum())

    def place(self, number: int) -> tuple[int, int]:
        """Which file, and which group of it."""
        file = int(np.searchsorted(self.starts, number, "right")) - 1
        return file, number - int(self.starts[file])


def layout_of(source: Source) -> Layout:
    """The layout of a source whose files are Parquet, or Arrow ("*.arrow", "*.feather").

    Raises:
        DataError: a file is damaged or of another kind, with its path.
        VolumeError: there are no rows.
    """
    kept = source.listing.file.with_suffix(".groups.json")
    told = atomic.read_json(kept)
    if told is None:
        told = _told(source)
        atomic.write_json(kept, told, durable=False)
    counts = np.array([rows for file in told["groups"] for rows in file], np.int64)
    if not counts.any():
        raise VolumeError(
            f"the {len(source)} files of the table in {source.volume.url} hold no rows", url=source.volume.url
        )
    starts = np.zeros(len(source) + 1, np.int64)
    np.cumsum([len(file) for file in told["groups"]], out=starts[1:])
    return Layout(starts=starts, counts=counts, columns=tuple(told["columns"]))


def _told(source: Source) -> dict[str, Any]:
    entries = list(source.listing.entries())
    with ThreadPoolExecutor(min(_THREADS, len(entries))) as pool:
        ends = list(pool.map(lambda entry: _end(source.volume, entry), entries))
    return {"columns": ends[0][0], "groups": [groups for _, groups in ends]}


def _end(volume: Volume, entry: Entry) -> tuple[list[str], list[int]]:
    arrow = optional("pyarrow", extra="tables", purpose="reading tables")
    try:
        file = opened(_Ranges(volume, entry), entry.path)
        if is_arrow(entry.path):
            return list(file.schema.names), [_UNKNOWN_ROWS] * file.num_record_batches
        about = file.metadata
        return list(file.schema_arrow.names), [about.row_group(g).num_rows for g in range(about.num_row_groups)]
    except (OSError, ValueError, arrow.ArrowException) as problem:
        raise DataError(
            f"{entry.path} in volume {volume.url} ({entry.size_bytes} bytes) is no whole table: "
            f"{type(problem).__name__}: {problem}. Repair it, or leave it out by pattern.",
            url=volume.url, path=entry.path,
        ) from problem  # fmt: skip


def is_arrow(path: str) -> bool:
    return path.endswith((".arrow", ".feather"))


def opened(file: Any, path: str) -> Any:
    """A pyarrow reader of a local path or file object; `path` tells the kind."""
    if is_arrow(path):
        ipc = optional("pyarrow.ipc", extra="tables", purpose="reading Arrow files")
        return ipc.open_file(file)
    return optional("pyarrow.parquet", extra="tables", purpose="reading Parquet").ParquetFile(file)


class _Ranges(io.RawIOBase):
    """A file of a volume of which only what is asked for comes."""

    def __init__(self, volume: Volume, entry: Entry) -> None:
        self._volume, self._entry, self._at = volume, entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.size_bytes}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._entry.size_bytes, self._at + len(buffer))
        if stop <= self._at:
            return 0
        piece = self._volume.read(self._entry, self._at, stop)
        buffer[: len(piece)] = piece
        self._at = stop
        return len(piece)


def local_reader(path: str) -> Any:
    """The same for a local copy, mapped into memory where that spares reading."""
    if not is_arrow(path):
        return opened(pathlib.Path(path), path)
    return opened(optional("pyarrow", extra="tables", purpose="reading Arrow files").memory_map(path), path)
