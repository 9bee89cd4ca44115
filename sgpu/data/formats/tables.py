"""Rows of Parquet, Arrow and Delta tables; row groups are dealt to ranks and workers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from sgpu.contract.errors import InputError
from sgpu.data.dataset import VolumeDataset
from sgpu.data.formats.base import ManyDataset, Transform, told
from sgpu.data.formats.delta import DeltaFiles, is_delta, open_delta
from sgpu.data.formats.groups import Layout, is_arrow, layout_of, local_reader
from sgpu.data.formats.optional import optional
from sgpu.data.ordering.order import mix, order
from sgpu.data.source import Source, options_of

_ROWS_AT_ONCE = 1024
_PATTERN = "**/*.{parquet,arrow,feather}"


class _Place(NamedTuple):
    """Which row group: its number in the table and in its file."""

    number: int
    group: int
    epoch: int


class _Groups(VolumeDataset):
    """A volume whose numbers stand for row groups; each comes as (local path, place)."""

    def __init__(self, source: Source, layout: Layout, shuffle: bool, seed: int) -> None:
        self._begin(source, shuffle, seed)
        self.yield_metadata, self.layout = False, layout

    def __len__(self) -> int:
        return len(self.layout)

    def file_of(self, number: int) -> int:
        return self.layout.place(number)[0]

    def item_of(self, number: int, path: str, epoch: int) -> tuple[str, _Place]:
        return path, _Place(number, self.layout.place(number)[1], epoch)


class TableDataset(ManyDataset):
    """Rows of a table, each a dict of Python values by column.

    Row groups (of Arrow files: record batches) are what ranks and workers share; a resume reads at most one a worker
    again, and any world size and number of workers continues. A file is fetched once a node, whole.

    Args:
        url: a folder or URL with Parquet or Arrow files ("*.parquet", "*.arrow", "*.feather"), or a Delta table.
        columns: only these are read; None: all.
        shuffle: row groups in a new order each epoch, and the rows within each; a function of seed and epoch.
        version: of a Delta table; None: the newest, at which this data set then stays.
        pattern: which files; None: by what is there. With it, a Delta table's log is not looked at.
        storage_options: for the log of a Delta table on an object store, as deltalake takes them.
        cache_dir, cache_limit_bytes, min_free_disk_bytes: as for `VolumeDataset`.

    Attributes:
        rows: of the whole table; None where files do not tell (Arrow's).
        groups: of the whole table.
        version: of a Delta table, else None.

    Raises:
        InputError: pyarrow or deltalake is not installed, or a column is not there.
        VolumeError: there is no table, or it holds no rows.
        DataError: a file is damaged or of another kind, with its path.
    """

    kind = "table"

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        shuffle: bool = False,
        seed: int = 0,
        version: int | None = None,
        pattern: str | None = None,
        transform: Transform | None = None,
        storage_options: Mapping[str, str] | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit_bytes: int | None = None,
        min_free_disk_bytes: int | None = None,
    ) -> None:
        arrow = optional("pyarrow", extra="tables", purpose="reading tables")
        self.damage = (OSError, ValueError, arrow.ArrowException)
        options = options_of(url, pattern or _PATTERN, cache_dir, cache_limit_bytes, min_free_disk_bytes)
        self.delta: DeltaFiles | None = None
        if pattern is None and is_delta(options.url):
            self.delta = open_delta(options.url, version, storage_options or {})
            options = replace(options, paths=tuple(sorted(self.delta.partitions)))
        elif version is not None:
            raise InputError(f"version={version} needs a Delta table; {options.url} has no _delta_log")
        source = Source(options)
        layout = layout_of(source)
        super().__init__(_Groups(source, layout, shuffle, seed), transform)
        self.rows, self.groups = layout.rows, len(layout)
        self.version = None if self.delta is None else self.delta.version
        self.columns = self._checked(columns, layout.columns)

    def _checked(self, columns: Sequence[str] | None, there: Sequence[str]) -> tuple[str, ...] | None:
        if columns is None:
            return None
        if isinstance(columns, str):
            raise InputError(f"columns must be several, as [{columns!r}]; found one string")
        known = {*there, *self._partition_of(self.files.source.listing.path(0))}
        missing = [name for name in columns if name not in known]
        if missing or not columns:
            raise InputError(
                f"the table {self.files.url} has no column {', '.join(missing) or '(none was named)'}; it has "
                f"{', '.join(sorted(known))}"
            )
        return tuple(columns)

    def _partition_of(self, relative: str) -> Mapping[str, Any]:
        return {} if self.delta is None else self.delta.partitions[relative]

    def __iter__(self) -> Iterator[Any]:
        for path, place in self.files:
            number = 0
            rows = self._rows(path, place)
            while True:
                try:
                    row = next(rows)
                except StopIteration:
                    break
                except self.damage as problem:
                    raise self._damaged(path, problem, f" (row group {place.group}, row {number})") from problem
                number += 1
                yield self._finished(row, None)

    def _rows(self, path: str, place: _Place) -> Iterator[dict[str, Any]]:
        table, constant = self._group(path, place.group)
        count = len(table)
        positions = np.arange(count, dtype=np.int64)
        if self.files.shuffle:
            positions = order(
                positions, samples=max(1, count), seed=mix(self.files.seed, place.number) >> 1, epoch=place.epoch
            )  # fmt: skip
        for start in range(0, count, _ROWS_AT_ONCE):
            some = positions[start : start + _ROWS_AT_ONCE]
            chosen = table.take(some) if self.files.shuffle else table.slice(start, len(some))
            for row in chosen.to_pylist():
                yield {**row, **constant}

    def _group(self, path: str, group: int) -> tuple[Any, Mapping[str, Any]]:
        """The rows of a group, and what the folders' names tell of all of them."""
        constant = self._partition_of(self.files.relative_path(path))
        wanted = self.columns
        if wanted is not None:
            constant = {name: constant[name] for name in wanted if name in constant}
            wanted = tuple(name for name in wanted if name not in constant)
        file = local_reader(path)
        names = file.schema.names if is_arrow(path) else file.schema_arrow.names
        lacking = [name for name in wanted or () if name not in names]
        if lacking:
            raise told(f"it has no column {', '.join(lacking)}; it has {', '.join(names)}")
        if not is_arrow(path):
            return file.read_row_group(group, columns=wanted, use_threads=False), constant
        arrow = optional("pyarrow", extra="tables", purpose="reading Arrow files")
        table = arrow.Table.from_batches([file.get_batch(group)])
        return (table if wanted is None else table.select(wanted)), constant
