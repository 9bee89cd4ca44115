"""One rank's part of a save, as plain values: what is staged where, and what makes a checkpoint of it. Without torch.

A job is all that the helper process needs to finish a save by itself, also when its trainer is gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sgpu.checkpoint.format import names
from sgpu.checkpoint.format.metadata_pickle import Box
from sgpu.checkpoint.writing.write import FileJob
from sgpu.contract.policies import CheckpointPolicy


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor (or a shard of it) in this rank's file. Tied tensors share a row, under all their names."""

    names: tuple[str, ...]
    dtype: str
    shape: Box
    offsets: Box
    sizes: Box
    head_bytes: int
    data_bytes: int
    size_bytes: int

    def to_json(self) -> list[Any]:
        return [self.names, self.dtype, self.shape, self.offsets, self.sizes, self.head_bytes, self.data_bytes,
                self.size_bytes]  # fmt: skip

    @classmethod
    def from_json(cls, value: list[Any]) -> Row:
        told, dtype, shape, offsets, sizes, head, data, size = value
        return cls(
            names=tuple(told), dtype=dtype, shape=tuple(shape), offsets=tuple(offsets), sizes=tuple(sizes),
            head_bytes=head, data_bytes=data, size_bytes=size,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The tensors of this rank's file, one after the other. The same for as long as the state keeps its shape.

    Attributes:
        id: differs where the layout does.
        view: a digest of names, shapes and dtypes; the same on all ranks, or the save is refused.
        tensors: in the state of all ranks together.
    """

    id: str
    view: str
    rows: tuple[Row, ...]
    tensors: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(row.size_bytes for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id, "view": self.view, "tensors": self.tensors, "rows": [row.to_json() for row in self.rows],
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Layout:
        rows = tuple(map(Row.from_json, value["rows"]))
        return cls(id=value["id"], view=value["view"], tensors=value["tensors"], rows=rows)


Echo = tuple[str, Box, int]


def echoes_from_json(value: list[Any]) -> tuple[Echo, ...]:
    return tuple((name, tuple(offsets), crc) for name, offsets, crc in value)


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """What one rank hands over. In its memory lie the layout's tensors, then `own_objects`, then the rank's file.

    Attributes:
        objects: name of a part -> checksum of what is not a tensor in it; all ranks must hold these alike.
        own_objects: (name, bytes) of those that this rank writes.
        echoes: (name, offsets, checksum) of shards that others write, and this rank holds as well.
        rank_bytes: size of this rank's own file; 0 for none.
        metadata, versions, run_id: for the manifest.
        policy: which checkpoints stay, besides `keep`, the one resumed from; `damaged` ones do not count as valid.
        since: monotonic time at which the save began, and `blocked_seconds` that it held up the training.
    """

    folder: str
    step: int
    attempt: int
    generation: int
    rank: int
    world_size: int
    layout: Layout
    objects: dict[str, str]
    own_objects: tuple[tuple[str, int], ...] = ()
    echoes: tuple[Echo, ...] = ()
    rank_bytes: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    run_id: str | None = None
    policy: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    keep: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    since: float = 0.0
    blocked_seconds: float = 0.0

    @property
    def files(self) -> tuple[FileJob, ...]:
        found = []
        spans = [row.size_bytes for row in self.layout.rows] + [size for _, size in self.own_objects]
        if spans:
            found.append(FileJob(name=names.shard_name(self.rank), start=0, spans=tuple(spans)))
        if self.rank_bytes:
            start = sum(spans)
            found.append(FileJob(name=names.rank_file(self.rank), start=start, spans=(self.rank_bytes,)))
        return tuple(found)

    @property
    def size_bytes(self) -> int:
        return self.layout.size_bytes + sum(size for _, size in self.own_objects) + self.rank_bytes

    def to_json(self, *, with_layout: bool = True) -> dict[str, Any]:
        value = {name: getattr(self, name) for name in _PLAIN}
        policy = self.policy.to_dict()
        policy["root"] = None  # the receiver has its store
        return {
            **value, "policy": policy, "layout_id": self.layout.id,
            **({"layout": self.layout.to_json()} if with_layout else {}),
        }  # fmt: skip

    @classmethod
    def from_json(cls, value: dict[str, Any], known: Layout | None = None) -> SaveJob:
        """`known`: the layout of an earlier job, for a value without one.

        Raises:
            ValueError: there is no layout, or another one is meant.
        """
        layout = Layout.from_json(value["layout"]) if "layout" in value else known
        if layout is None or layout.id != value["layout_id"]:
            raise ValueError(f"layout {value['layout_id']} was never told")
        plain = {name: value[name] for name in _PLAIN}
        plain["own_objects"] = tuple((name, size) for name, size in value["own_objects"])
        plain["echoes"] = echoes_from_json(value["echoes"])
        plain["keep"], plain["damaged"] = tuple(value["keep"]), tuple(value["damaged"])
        return cls(layout=layout, policy=CheckpointPolicy(**value["policy"]), **plain)


_PLAIN = (
    "folder", "step", "attempt", "generation", "rank", "world_size", "objects", "own_objects", "echoes", "rank_bytes",
    "metadata", "versions", "run_id", "keep", "damaged", "since", "blocked_seconds",
)  # fmt: skip
