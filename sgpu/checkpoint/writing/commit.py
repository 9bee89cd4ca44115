"""From done-files to a commit: in the background, through the store alone, without collectives, without torch.

Each rank writes its share, then `.done-<rank>.json`; or `.failed-<rank>.json`, which ends the save for all. Rank 0
waits for all of them, compares, and publishes. The others wait for the commit record.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from sgpu.checkpoint.format import collector, metadata_write, names
from sgpu.checkpoint.format.manifest import FileEntry, Item, Manifest
from sgpu.checkpoint.format.metadata_pickle import OUR_SAVE_ID, Box, CheckpointIndex, Chunk, Place, TensorInfo
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing import newest, ownership, shard_index
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.checkpoint.writing.publish import check_sizes, publish
from sgpu.checkpoint.writing.told import Told
from sgpu.contract.errors import CheckpointSaveError

FIRST_LOOK_SECONDS = 0.005
LAST_LOOK_SECONDS = 0.2
READS_AT_ONCE = 16


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long other ranks are waited for.

    Attributes:
        seconds: without any progress; asked anew each time.
        may_come: whether a rank can still deliver, as far as is known here.
        pause: waits so many seconds, or less where there is news.
    """

    seconds: Callable[[], float]
    may_come: Callable[[int], bool] = lambda rank: True
    pause: Callable[[float], None] = time.sleep


def wait_for(
    store: Store,
    folder: str,
    missing: Callable[[list[str]], Iterable[int]],
    patience: Patience,
    what: str,
    look: Callable[[], list[str]] | None = None,
) -> None:
    """Looks into the folder until no rank is missing; `look` gives the names to judge by, if not all.

    A store tells nobody that a file appeared, so it has to be looked at: often at first, then five times a second.

    Raises:
        CheckpointSaveError: a rank failed or cannot come any more, or nothing moved for `patience.seconds()`.
    """
    pause, best = FIRST_LOOK_SECONDS, -1
    last = time.monotonic()
    where = f"{store.url}/{folder}"
    look = look or (lambda: store.names(folder))
    while True:
        found = look()
        for rank in names.told_ranks(found, "failed"):
            reason, facts = _reason(store, folder, rank)
            raise CheckpointSaveError(reason, **{"rank": rank, **facts, "path": where})
        left = list(missing(found))
        if not left:
            return
        gone = [rank for rank in left if not patience.may_come(rank)]
        if gone and not set(gone) - set(missing(look())):
            raise CheckpointSaveError(
                f"{where} was not committed: rank {gone[0]} ended before it handed over its share.",
                rank=gone[0],
                path=where,
            )
        if best < 0 or len(left) < best:
            best, last = len(left), time.monotonic()
        if time.monotonic() - last > patience.seconds():
            raise CheckpointSaveError(
                f"{where} was not committed: waited {patience.seconds():.0f} s for {what}; missing: "
                f"rank {', '.join(map(str, left[:10]))}.",
                path=where,
            )
        patience.pause(pause)
        pause = min(pause * 1.5, LAST_LOOK_SECONDS)


def _reason(store: Store, folder: str, rank: int) -> tuple[str, dict[str, Any]]:
    """What a rank said, and facts for the error that tells it."""
    path = f"{folder}/{names.failed_name(rank)}"
    if not store.size(path):
        return f"rank {rank}: its save failed, and its storage took not even the reason (see its log)", {}
    told = _read_told(store, path)
    text = str(told.get("reason"))
    return (text if text.startswith("rank ") else f"rank {rank}: {text}"), dict(told.get("facts") or {})


def _read_told(store: Store, path: str) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(store.read(path))
    except ValueError as error:
        raise CheckpointSaveError(f"{store.url}/{path} is not what was written: {error}", path=path) from error
    return told


def tell_failed(store: Store, folder: str, rank: int, reason: str, facts: Mapping[str, Any]) -> None:
    """Ends the others' waiting, unless one has done so already. On a full disk an empty file says it too.

    Rank 0 tells it in any case: the others look for its word only.
    """
    if rank != 0 and names.told_ranks(store.names(folder), "failed"):
        return
    path = f"{folder}/{names.failed_name(rank)}"
    content = json.dumps({"reason": reason, "facts": dict(facts)}).encode()
    try:
        store.put(path, [memoryview(content)])
    except OSError:
        store.create(path, b"")


def commit(store: Store, job: SaveJob, patience: Patience) -> Manifest:
    """Rank 0's part."""
    folder = job.folder

    def missing(found: list[str]) -> Iterable[int]:
        return sorted(set(range(job.world_size)) - set(names.told_ranks(found, "done")))

    wait_for(store, folder, missing, patience, "the shares of all ranks")
    paths = [f"{folder}/{names.done_name(rank)}" for rank in range(job.world_size)]
    with ThreadPoolExecutor(READS_AT_ONCE) as pool, collector.paused():
        told = [Told.from_json(value) for value in pool.map(functools.partial(_read_told, store), paths)]
    where = f"{store.url}/{folder}"
    check_alike(told, where)
    index, entries = assemble(told, where)
    sharded = shard_index.summarize(store, folder, (rank.index for rank in told if rank.index is not None), where)
    check_sizes(store, folder, entries)
    ownership.require(store, job.attempt)

    def clean() -> None:
        store.delete_files(paths)

    manifest = replace(manifest_of(job, entries), sharded=sharded)
    manifest = publish(store, folder, manifest, metadata_write.encode(index, where), clean)
    newest.note(store, folder)
    return manifest


def manifest_of(job: SaveJob, entries: dict[str, FileEntry]) -> Manifest:
    return Manifest(
        step=job.step, attempt=job.attempt, world_size=job.world_size, files=entries,
        created_unix_seconds=time.time(), versions=job.versions, run_id=job.run_id, metadata=job.metadata,
    )  # fmt: skip


def wait_for_commit(store: Store, job: SaveJob, patience: Patience) -> None:
    """The other ranks' part. They ask for two files only, since thousands of them may be waiting: rank 0 tells of
    whatever failed anywhere.
    """
    signs = (names.METADATA, names.failed_name(0))

    def look() -> list[str]:
        return [name for name in signs if store.size(f"{job.folder}/{name}") is not None]

    def missing(found: list[str]) -> list[int]:
        return [] if names.METADATA in found else [0]

    wait_for(store, job.folder, missing, patience, "the commit by rank 0", look)


def check_alike(told: list[Told], where: str) -> None:
    """What is kept once must be the same on all ranks, or a restore would give all ranks one rank's."""
    for rank in told[1:]:
        if rank.view != told[0].view:
            raise CheckpointSaveError(
                f"{where} was not committed: rank {rank.rank} holds other tensors (names, shapes or dtypes) in its "
                "state than rank 0. Give every rank the same state; what differs goes into per_rank.",
                path=where,
                rank=rank.rank,
            )
        for name in sorted(rank.objects.keys() | told[0].objects.keys()):
            if rank.objects.get(name) != told[0].objects.get(name):
                raise CheckpointSaveError(
                    f"{where} was not committed: the values in state[{name!r}] of rank {rank.rank} are not those of "
                    "rank 0, and only one of them could be kept. Put what differs between ranks into per_rank.",
                    path=where,
                    rank=rank.rank,
                )


def assemble(told: list[Told], where: str) -> tuple[CheckpointIndex, dict[str, FileEntry]]:
    """The index of all ranks' files together, and each file's entry for the manifest.

    Raises:
        CheckpointSaveError: something was written otherwise than planned, or some elements by nobody.
    """
    shapes: dict[str, tuple[str, Box, list[Chunk]]] = {}
    places: dict[tuple[str, Box | None], Place] = {}
    objects: set[str] = set()
    entries: dict[str, FileEntry] = {}
    for rank in told:
        files = {file.name: file for file in rank.files}
        shard = names.shard_name(rank.rank)
        spans = files[shard].spans if shard in files else ()
        if len(spans) != len(rank.rows) + len(rank.own_objects):
            raise CheckpointSaveError(
                f"{where}/{shard}: what was written is not what was planned", path=where, file=shard
            )
        items = []
        for row, span in zip(rank.rows, spans, strict=False):
            for name in row.names:
                shapes.setdefault(name, (row.dtype, row.shape, []))[2].append(
                    Chunk(offsets=row.offsets, sizes=row.sizes)
                )
                places[(name, row.offsets)] = Place(file=shard, offset=span.offset, size_bytes=span.size_bytes)
            items.append(shard_index.item_of(row, span))
        for name, span in zip(rank.own_objects, spans[len(rank.rows) :], strict=True):
            objects.add(name)
            places[(name, None)] = Place(file=shard, offset=span.offset, size_bytes=span.size_bytes)
            items.append(Item(name=name, offset=span.offset, size_bytes=span.size_bytes, crc32c=span.crc32c))
        for name, file in files.items():
            kept = tuple(items) if name == shard else ()
            entries[name] = FileEntry(size_bytes=file.size_bytes, crc32c=file.crc32c, items=kept)
        if rank.index is not None:
            entries[rank.index.name] = rank.index.entry
    tensors = {
        name: TensorInfo(dtype=dtype, shape=shape, chunks=tuple(chunks))
        for name, (dtype, shape, chunks) in shapes.items()
    }
    _check_covered(tensors, where)
    _check_echoes(told, places, entries, where)
    index = CheckpointIndex(
        tensors=tensors, objects=frozenset(objects), places=places,
        paths={name: (name,) for name in [*tensors, *sorted(objects)]}, save_id=OUR_SAVE_ID,
        version=metadata_write.DCP_VERSION,
    )  # fmt: skip
    return index, entries


def _check_covered(tensors: dict[str, TensorInfo], where: str) -> None:
    for name, tensor in tensors.items():
        held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if held != math.prod(tensor.shape):
            raise CheckpointSaveError(
                f"{where} was not committed: the ranks wrote {held} of the {math.prod(tensor.shape)} elements "
                f"of {name}.",
                path=where,
                tensor=name,
            )


def _check_echoes(
    told: list[Told], places: dict[tuple[str, Box | None], Place], entries: dict[str, FileEntry], where: str
) -> None:
    """Shards that ranks of several meshes hold must be the same, since only one of them was written."""
    if not any(rank.echoes for rank in told):
        return
    written = {(file, item.offset): item.crc32c for file, entry in entries.items() for item in entry.items}
    for rank in told:
        for name, offsets, crc in rank.echoes:
            place = places.get((name, offsets))
            if place is None or written[place.file, place.offset] != crc:
                raise CheckpointSaveError(
                    f"{where} was not committed: rank {rank.rank} holds a part of {name} (at {list(offsets)}) that is "
                    "not as in the other meshes of its kind, and only one of them could be kept. Make it one DTensor "
                    "over the whole mesh, or give each its own name.",
                    path=where,
                    rank=rank.rank,
                    tensor=name,
                    unrecoverable=True,
                )
