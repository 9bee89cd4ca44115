"""What a checkpoint holds, and whether its bytes are those that were written. Without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from sgpu.checkpoint.format import checksum
from sgpu.checkpoint.format.metadata_pickle import Box
from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.stores.store import CHUNK_BYTES, Store
from sgpu.contract.errors import CheckpointCorruptError

_ITEM_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2,
               "int16": 2, "complex128": 16, "uint64": 8, "uint32": 4, "uint16": 2}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    name: str
    dtype: str
    shape: Box
    size_bytes: int
    shards: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a checkpoint holds. `verified`: it has checksums; `objects` are names of what is not a tensor."""

    step: int
    path: str
    tensors: tuple[TensorEntry, ...]
    objects: tuple[str, ...]
    size_bytes: int
    world_size: int | None
    verified: bool
    created_unix_seconds: float | None
    versions: dict[str, str]
    run_id: str | None
    metadata: dict[str, Any]

    @property
    def data_position(self) -> Any:
        """As the training loop noted it; None where it did not."""
        return self.metadata.get("data_position")


@dataclass(frozen=True, kw_only=True)
class Verification:
    """`problems` are empty for a whole checkpoint. `verified`: there were checksums to compare with."""

    step: int
    path: str
    ok: bool
    verified: bool
    deep: bool
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """`changed`: another dtype or shape. `values_changed`: other bytes, where both have checksums."""

    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    values_changed: tuple[str, ...] = field(default=())


def inspect(store: Store, opened: Opened, step: int) -> Inspection:
    manifest = opened.manifest
    sharded = manifest.sharded if manifest else {}
    tensors = tuple(
        TensorEntry(
            name=name, dtype=info.dtype, shape=info.shape,
            shards=sharded[name].shards if name in sharded else len(info.chunks),
            size_bytes=math.prod(info.shape) * _ITEM_BYTES.get(info.dtype, 1),
        )
        for name, info in sorted(opened.index.tensors.items())
    )  # fmt: skip
    files = {place.file: 0 for place in opened.index.places.values()}
    size = manifest.size_bytes if manifest else sum(store.size(f"{opened.folder}/{f}") or 0 for f in files)
    return Inspection(
        step=step,
        path=opened.path,
        tensors=tensors,
        objects=tuple(sorted(opened.index.objects)),
        size_bytes=size,
        world_size=manifest.world_size if manifest else None,
        verified=manifest is not None,
        created_unix_seconds=manifest.created_unix_seconds if manifest else None,
        versions=manifest.versions if manifest else {},
        run_id=manifest.run_id if manifest else None,
        metadata=manifest.metadata if manifest else {},
    )


def deep_problems(store: Store, opened: Opened) -> list[str]:
    """Reads every byte, and names the items whose checksums differ."""
    problems = []
    for file, entry in (opened.manifest.files if opened.manifest else {}).items():
        spans = [(item.name, item.offset, item.size_bytes, item.crc32c) for item in entry.items]
        covered = sum(size for _, _, size, _ in spans)
        if not spans or covered != entry.size_bytes:
            spans = [(file, 0, entry.size_bytes, entry.crc32c)]
        for name, offset, size, expected in spans:
            if _crc(store, f"{opened.folder}/{file}", offset, size) != expected:
                problems.append(f"{name} in {file}: its bytes are not those that were written")
    return problems


def _crc(store: Store, path: str, offset: int, size_bytes: int) -> int:
    value = 0
    for start in range(offset, offset + size_bytes, CHUNK_BYTES):
        value = checksum.of(store.read(path, start, min(CHUNK_BYTES, offset + size_bytes - start)), value)
    return value


def diff(a: Opened, b: Opened) -> Difference:
    """What two checkpoints hold differently."""
    names_a, names_b = set(a.index.tensors) | a.index.objects, set(b.index.tensors) | b.index.objects
    both = a.index.tensors.keys() & b.index.tensors.keys()
    shape = {n: (a.index.tensors[n], b.index.tensors[n]) for n in both}
    changed = {n for n, (x, y) in shape.items() if (x.dtype, x.shape) != (y.dtype, y.shape)}
    sums_a, sums_b = _checksums(a), _checksums(b)
    same = (names_a & names_b) - changed
    comparable = {n for n in same if sums_a.get(n, {}).keys() == sums_b.get(n, {}).keys() and n in sums_a}
    return Difference(
        only_first=tuple(sorted(names_a - names_b)),
        only_second=tuple(sorted(names_b - names_a)),
        changed=tuple(sorted(changed)),
        values_changed=tuple(sorted(n for n in comparable if sums_a[n] != sums_b[n])),
    )


def _checksums(opened: Opened) -> dict[str, dict[Any, int]]:
    """Name -> {offsets of a shard: checksum}."""
    if opened.manifest is None:
        return {}
    at = {(file, item.offset): item.crc32c for file, e in opened.manifest.files.items() for item in e.items}
    if opened.finder is not None:
        at.update({place: item.crc32c for place, item in opened.finder.items.items()})
    found: dict[str, dict[Any, int]] = {}
    for (name, offsets), place in opened.index.places.items():
        value = at.get((place.file, place.offset))
        if value is None:
            raise CheckpointCorruptError(
                f"{opened.path}: manifest and commit record do not agree about {name}.", path=opened.path, tensor=name
            )
        found.setdefault(name, {})[offsets] = value
    return found
