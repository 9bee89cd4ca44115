"""What each rank tells rank 0 of a save, in its done-file. Without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from sgpu.checkpoint.format import names
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing import shard_index
from sgpu.checkpoint.writing.job import Echo, Row, SaveJob, echoes_from_json
from sgpu.checkpoint.writing.shard_index import IndexFile
from sgpu.checkpoint.writing.write import WrittenFile


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one rank has written, as its done-file says. `objects` must be alike on all ranks."""

    rank: int
    view: str
    objects: dict[str, str]
    rows: tuple[Row, ...]
    own_objects: tuple[str, ...]
    files: tuple[WrittenFile, ...]
    echoes: tuple[Echo, ...] = ()
    index: IndexFile | None = None

    @classmethod
    def of(cls, job: SaveJob, written: Iterable[WrittenFile]) -> Told:
        return cls(
            rank=job.rank, view=job.layout.view, objects=job.objects, rows=job.layout.rows,
            own_objects=tuple(name for name, _ in job.own_objects), files=tuple(written),
            echoes=job.echoes,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank, "view": self.view, "objects": self.objects,
            "rows": [row.to_json() for row in self.rows], "own_objects": self.own_objects,
            "files": [file.to_json() for file in self.files], "echoes": self.echoes,
            "index": None if self.index is None else asdict(self.index),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Told:
        return cls(
            rank=value["rank"], view=value["view"], objects=value["objects"],
            rows=tuple(map(Row.from_json, value["rows"])), own_objects=tuple(value["own_objects"]),
            files=tuple(map(WrittenFile.from_json, value["files"])), echoes=echoes_from_json(value["echoes"]),
            index=None if value["index"] is None else IndexFile(**value["index"]),
        )  # fmt: skip


def tell_done(store: Store, job: SaveJob, written: list[WrittenFile]) -> None:
    told = Told.of(job, written)
    if shard_index.needed(job.layout, job.world_size):
        told = _apart(store, job, told)
    content = json.dumps(told.to_json(), separators=(",", ":")).encode()
    store.put(f"{job.folder}/{names.done_name(job.rank)}", [memoryview(content)])


def _apart(store: Store, job: SaveJob, told: Told) -> Told:
    """With the rows of shards in a file of their own."""
    shard = names.shard_name(told.rank)
    rows, files, kept = told.rows, [], []
    for file in told.files:
        if file.name == shard:
            shards = [(row, span) for row, span in zip(rows, file.spans, strict=False) if shard_index.is_shard(row)]
            if not shards:
                return told
            kept = [
                span for number, span in enumerate(file.spans)
                if number >= len(rows) or not shard_index.is_shard(rows[number])
            ]  # fmt: skip
            file = replace(file, spans=tuple(kept))
            index = shard_index.put(store, job.folder, told.rank, job.layout.id, shards)
        files.append(file)
    if not rows:
        return told
    whole = tuple(row for row in rows if not shard_index.is_shard(row))
    return replace(told, rows=whole, files=tuple(files), index=index)
