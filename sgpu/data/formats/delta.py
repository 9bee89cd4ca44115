"""Which files a version of a Delta table consists of, and the values that stand in its folders' names."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgpu.contract.errors import InputError, VolumeError
from sgpu.data.formats.optional import optional
from sgpu.data.volumes.opening import open_volume

_LOG = "_delta_log"
_KNOWN_FEATURES = frozenset({"timestampNtz", "v2Checkpoint", "vacuumProtocolCheck", "deletionVectors", "columnMapping"})
"""Those that do not change what a file's rows mean, and two whose use is looked for."""


@dataclass(frozen=True, kw_only=True)
class DeltaFiles:
    """A version of a table.

    Attributes:
        partitions: values by column, by path; empty dicts for a table that is not partitioned.
    """

    version: int
    partitions: Mapping[str, Mapping[str, Any]]


def is_delta(url: str) -> bool:
    """Whether there is a table's log at a path or URL."""
    return open_volume(url).has_folder(_LOG)


def open_delta(url: str, version: int | None, storage_options: Mapping[str, str]) -> DeltaFiles:
    """The files of a version (None: the newest).

    Raises:
        VolumeError: there is no such version, or it has no files.
        InputError: deltalake is not installed, or the table uses what would make its rows others than the files say.
    """
    delta = optional("deltalake", extra="tables", purpose="reading Delta tables")
    errors = optional("deltalake.exceptions", extra="tables", purpose="reading Delta tables")
    try:
        table = delta.DeltaTable(
            os.path.expanduser(url), version=version, storage_options=dict(storage_options) or None
        )
        _check_features(url, table)
        actions = optional("pyarrow", extra="tables", purpose="reading Delta tables").table(
            table.get_add_actions(flatten=True)
        )
    except (errors.DeltaError, OSError) as problem:
        raise VolumeError(
            f"the Delta table {url} (version {'newest' if version is None else version}) cannot be read: {problem}",
            url=url,
        ) from problem
    rows = actions.to_pylist()
    if not rows:
        raise VolumeError(f"version {table.version()} of the Delta table {url} has no files", url=url)
    return DeltaFiles(version=table.version(), partitions={_path(row["path"], url): _values(row) for row in rows})


def _path(told: str, url: str) -> str:
    if "://" in told or told.startswith("/"):
        raise InputError(
            f"the Delta table {url} holds files of another place, as {told} (a shallow clone?); make a copy of its own"
        )
    return urllib.parse.unquote(told)


def _values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix("partition."): value for name, value in row.items() if name.startswith("partition.")}


def _check_features(url: str, table: Any) -> None:
    unknown = set(table.protocol().reader_features or ()) - _KNOWN_FEATURES
    mapped = table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
    deleted = optional("pyarrow", extra="tables", purpose="reading Delta tables").table(table.deletion_vectors())
    used = [*sorted(unknown), *(["columnMapping"] if mapped else []), *(["deletionVectors"] if len(deleted) else [])]
    if used:
        raise InputError(
            f"the Delta table {url} uses {', '.join(used)}, so that its files do not say by themselves what its rows "
            "are. Write a plain copy (for deleted rows: REORG TABLE ... APPLY (PURGE)), and read that."
        )
