"""Where each shard lies, for checkpoints of so many ranks that one record of all shards would be gigabytes.

There, each rank keeps the rows of its own shards in a file beside its data, and the commit record and the manifest
list what is whole, and names, dtypes and shapes of what is sharded. Rank 0 reads one such file of each kind of rank
only: ranks that hold shards of the same extents are alike but for where these lie. Without torch.
"""

from __future__ import annotations

import functools
import json
import math
import threading
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from sgpu.checkpoint.format import checksum, collector, names
from sgpu.checkpoint.format.checksum import Span
from sgpu.checkpoint.format.manifest import FileEntry, Item, Manifest, Sharded
from sgpu.checkpoint.format.metadata_pickle import CheckpointIndex, Chunk, Place, TensorInfo
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing.job import Layout, Row
from sgpu.contract.errors import CheckpointCorruptError, CheckpointSaveError

# More shards than this are not listed in one record: torch's reader makes several objects of each.
MOST_LISTED = 1_000_000
_AT_ONCE = 16
_NEIGHBOURS = 8


@dataclass(frozen=True, kw_only=True)
class IndexFile:
    """One rank's own. `kind` is equal for ranks that hold shards of the same tensors with the same extents."""

    name: str
    size_bytes: int
    crc32c: int
    kind: str

    @property
    def entry(self) -> FileEntry:
        return FileEntry(size_bytes=self.size_bytes, crc32c=self.crc32c)


def needed(layout: Layout, world_size: int) -> bool:
    """The same on all ranks."""
    return layout.tensors * world_size > MOST_LISTED


def is_shard(row: Row) -> bool:
    return row.sizes != row.shape


@functools.lru_cache(maxsize=8)
def _kind(_layout_id: str, rows: tuple[Row, ...]) -> str:
    told = [(row.names, row.dtype, row.shape, row.sizes, row.size_bytes) for row in rows]
    return checksum.text(checksum.of(repr(told).encode()))


def put(store: Store, folder: str, rank: int, layout_id: str, rows: list[tuple[Row, Span]]) -> IndexFile:
    content = zlib.compress(
        json.dumps(
            {
                "rows": [row.to_json() for row, _ in rows],
                "spans": [[span.offset, span.size_bytes, span.crc32c] for _, span in rows],
            },
            separators=(",", ":"),
        ).encode(),
        1,
    )
    name = names.index_file(rank)
    store.put(f"{folder}/{name}", [memoryview(content)])
    kind = _kind(layout_id, tuple(row for row, _ in rows))
    return IndexFile(name=name, size_bytes=len(content), crc32c=checksum.of(content), kind=kind)


def _parse(content: bytes) -> Iterator[tuple[Row, Span]]:
    value = json.loads(zlib.decompress(content))
    for row, (offset, size, crc) in zip(value["rows"], value["spans"], strict=True):
        yield Row.from_json(row), Span(offset=offset, size_bytes=size, crc32c=crc)


def summarize(store: Store, folder: str, files: Iterable[IndexFile], where: str) -> dict[str, Sharded]:
    """What the ranks hold together, from one file of each kind.

    Raises:
        CheckpointSaveError: of some tensor they hold more or less than all.
    """
    kinds: dict[str, tuple[IndexFile, int]] = {}
    for file in files:
        first, count = kinds.get(file.kind, (file, 0))
        kinds[file.kind] = (first, count + 1)
    found: dict[str, Sharded] = {}
    held: dict[str, int] = {}
    for first, count in kinds.values():
        for row, _ in _parse(_read(store, folder, first.name, first.entry, where)):
            for name in row.names:
                known = found.get(name, Sharded(dtype=row.dtype, shape=row.shape, shards=0))
                found[name] = replace(known, shards=known.shards + count)
                held[name] = held.get(name, 0) + count * math.prod(row.sizes)
    for name, tensor in found.items():
        if held[name] != math.prod(tensor.shape):
            raise CheckpointSaveError(
                f"{where} was not committed: the ranks wrote {held[name]} of the {math.prod(tensor.shape)} elements "
                f"of {name}.",
                path=where,
                tensor=name,
            )
    return found


def _read(store: Store, folder: str, file: str, entry: FileEntry, where: str) -> bytes:
    content = store.read(f"{folder}/{file}" if folder else file)
    if len(content) != entry.size_bytes or checksum.of(content) != entry.crc32c:
        raise CheckpointCorruptError(
            f"{where} is damaged: {file}: its bytes are not those that were written. Use another checkpoint; this one "
            "was left as it is.",
            path=where,
            file=file,
        )
    return content


def without_shards(index: CheckpointIndex, manifest: Manifest) -> CheckpointIndex:
    """With names, dtypes and shapes of what is sharded, but not where the shards lie."""
    sharded = {
        name: TensorInfo(dtype=found.dtype, shape=found.shape, chunks=()) for name, found in manifest.sharded.items()
    }
    return replace(index, tensors={**index.tensors, **sharded})


def with_shards(opened: CheckpointIndex, finder: ShardFinder) -> CheckpointIndex:
    """With every shard of every rank: reads all of their files."""
    index = replace(opened, tensors=dict(opened.tensors), places=dict(opened.places))
    while finder.more(index) is not None:
        pass
    return index


class ShardFinder:
    """Learns where shards lie, from the ranks' own files: first from those that are likely to hold what one rank
    needs.

    Args:
        store: where the checkpoint is.
        folder: its folder.
        manifest: its manifest.
        where: its path or URL, for errors.
        near: of which rank, of how many; None: all at once.
    """

    def __init__(
        self, store: Store, folder: str, manifest: Manifest, where: str, near: tuple[int, int] | None = None
    ) -> None:
        self._store, self._folder, self._manifest, self._where = store, folder, manifest, where
        self._groups = _groups(manifest.world_size, near)
        self._lock = threading.Lock()
        self.items: dict[tuple[str, int], Item] = {}

    def more(self, index: CheckpointIndex) -> dict[tuple[str, int], Item] | None:
        """Adds shards to the index; gives what is new, by file and offset. None: all are known.

        Raises:
            CheckpointCorruptError: a file is not as it was written.
        """
        with self._lock:
            group = next(self._groups, None)
            if group is None:
                return None
            new: dict[tuple[str, int], Item] = {}
            chunks: dict[str, list[Chunk]] = {}
            for rank, content in self._read(group):
                shard = names.shard_name(rank)
                for row, span in _parse(content):
                    place = Place(file=shard, offset=span.offset, size_bytes=span.size_bytes)
                    for name in row.names:
                        chunks.setdefault(name, []).append(Chunk(offsets=row.offsets, sizes=row.sizes))
                        index.places[name, row.offsets] = place
                    new[shard, span.offset] = item_of(row, span)
            for name, found in chunks.items():
                info = index.tensors[name]
                index.tensors[name] = replace(info, chunks=(*info.chunks, *found))
            self.items.update(new)
            return new

    def _read(self, group: list[int]) -> Iterator[tuple[int, bytes]]:
        files = self._manifest.files
        ranks = [rank for rank in group if names.index_file(rank) in files]

        def read(rank: int) -> bytes:
            file = names.index_file(rank)
            return _read(self._store, self._folder, file, files[file], self._where)

        with ThreadPoolExecutor(_AT_ONCE) as pool, collector.paused():
            yield from zip(ranks, pool.map(read, ranks), strict=True)


def _groups(world_size: int, near: tuple[int, int] | None) -> Iterator[list[int]]:
    """Ranks in the order in which they are asked: the one itself, then its neighbours, further and further."""
    if near is None:
        yield list(range(world_size))
        return
    rank, of = near
    low = high = rank * world_size // of
    yield [low]
    width = _NEIGHBOURS
    while low > 0 or high < world_size - 1:
        wider = max(0, low - width), min(world_size - 1, high + width)
        yield [*range(wider[0], low), *range(high + 1, wider[1] + 1)]
        (low, high), width = wider, 2 * width


def item_of(row: Row, span: Span) -> Item:
    return Item(
        name=row.names[0], offset=span.offset, size_bytes=span.size_bytes, crc32c=span.crc32c,
        data_offset=span.offset + row.head_bytes, data_bytes=row.data_bytes,
    )  # fmt: skip
