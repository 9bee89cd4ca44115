"""From done-files to a commit: in the background, through the store alone, without collectives.

Each rank writes its share, then `.done-<rank>.json`; or `.failed-<rank>.json`, which ends the save for all. Rank 0
waits for all of them, compares, and publishes. The others wait for the commit record.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from sgpu import settings
from sgpu.checkpoint import metadata_pickle, names, versions
from sgpu.checkpoint.manifest import FileEntry, Item, Manifest
from sgpu.checkpoint.publish import check_sizes, publish
from sgpu.checkpoint.share import Slot
from sgpu.checkpoint.storage import Store
from sgpu.checkpoint.write import WrittenFile
from sgpu.contract.errors import CheckpointSaveError

FIRST_LOOK_SECONDS = 0.002
LAST_LOOK_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a rank staged, before it is written. `objects` are the checksums of what all ranks must hold alike."""

    rank: int
    view: str
    objects: dict[str, str]
    slots: tuple[Slot, ...]
    object_names: tuple[str, ...]

    def to_json(self, written: list[WrittenFile]) -> dict[str, Any]:
        slots = [
            [list(s.names), s.dtype, list(s.shape), list(s.chunk.offsets), list(s.chunk.sizes), len(s.around.head),
             s.around.data_bytes]
            for s in self.slots
        ]  # fmt: skip
        return {
            "rank": self.rank,
            "view": self.view,
            "objects": self.objects,
            "slots": slots,
            "object_names": list(self.object_names),
            "files": [file.to_json() for file in written],
        }


@dataclass(frozen=True, kw_only=True)
class Commit:
    step: int
    attempt: int
    folder: str
    world_size: int
    metadata: dict[str, Any]


def wait_for(
    store: Store, folder: str, reached: Callable[[list[str]], int], goal: int, patience: Callable[[], float], what: str
) -> None:
    """Looks into the folder until `reached` gives `goal`.

    A store tells nobody that a file appeared, so it has to be looked at: often at first, then five times a second.

    Raises:
        CheckpointSaveError: a rank failed, or nothing moved for `patience()` seconds.
    """
    pause, best = FIRST_LOOK_SECONDS, -1
    last = time.monotonic()
    while True:
        found = store.names(folder)
        for rank in names.told_ranks(found, "failed"):
            raise CheckpointSaveError(_reason(store, folder, rank), rank=rank, path=f"{store.url}/{folder}")
        now = reached(found)
        if now >= goal:
            return
        if now > best:
            best, last = now, time.monotonic()
        if time.monotonic() - last > patience():
            raise CheckpointSaveError(
                f"{store.url}/{folder} was not committed: waited {patience():.0f} s for {what}, have {now} of {goal}.",
                path=f"{store.url}/{folder}",
            )
        time.sleep(pause)
        pause = min(pause * 1.5, LAST_LOOK_SECONDS)


def _reason(store: Store, folder: str, rank: int) -> str:
    text = str(_read_told(store, f"{folder}/{names.failed_name(rank)}").get("reason"))
    return text if text.startswith("rank ") else f"rank {rank}: {text}"


def _read_told(store: Store, path: str) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(store.read(path))
    except ValueError as error:
        raise CheckpointSaveError(f"{store.url}/{path} is not what was written: {error}", path=path) from error
    return told


def tell_failed(store: Store, folder: str, rank: int, reason: str) -> None:
    store.put(f"{folder}/{names.failed_name(rank)}", [memoryview(json.dumps({"reason": reason}).encode())])


def tell_done(store: Store, folder: str, promise: Promise, written: list[WrittenFile]) -> None:
    content = json.dumps(promise.to_json(written), separators=(",", ":")).encode()
    store.put(f"{folder}/{names.done_name(promise.rank)}", [memoryview(content)])


def commit(store: Store, job: Commit, patience: Callable[[], float]) -> Manifest:
    """Rank 0's part."""
    folder = job.folder
    wait_for(store, folder, lambda found: len(names.told_ranks(found, "done")), job.world_size, patience,
             "the shares of all ranks")  # fmt: skip
    told = [_read_told(store, f"{folder}/{names.done_name(rank)}") for rank in range(job.world_size)]
    where = f"{store.url}/{folder}"
    _check_alike(told, where)
    files = {file["name"]: WrittenFile.from_json(file) for rank in told for file in rank["files"]}
    metadata, entries = _assemble(told, files, where)
    check_sizes(store, folder, entries)
    manifest = Manifest(
        step=job.step,
        attempt=job.attempt,
        world_size=job.world_size,
        files=entries,
        created_unix_seconds=time.time(),
        versions=versions.all_versions(),
        run_id=run.name if (run := settings.run_dir()) else None,
        metadata=job.metadata,
    )

    def clean() -> None:
        for rank in range(job.world_size):
            store.delete(f"{folder}/{names.done_name(rank)}")

    return publish(store, folder, manifest, metadata, clean)


def _check_alike(told: list[dict[str, Any]], where: str) -> None:
    """What is kept once must be the same on all ranks, or a restore would give all ranks one rank's."""
    for rank in told[1:]:
        if rank["view"] != told[0]["view"]:
            raise CheckpointSaveError(
                f"{where} was not committed: rank {rank['rank']} holds other tensors (names, shapes or dtypes) in its "
                "state than rank 0. Give every rank the same state; what differs goes into per_rank.",
                path=where,
                rank=rank["rank"],
            )
        for name in sorted(rank["objects"].keys() | told[0]["objects"].keys()):
            if rank["objects"].get(name) != told[0]["objects"].get(name):
                raise CheckpointSaveError(
                    f"{where} was not committed: the values in state[{name!r}] of rank {rank['rank']} are not those of "
                    "rank 0, and only one of them could be kept. Put what differs between ranks into per_rank.",
                    path=where,
                    rank=rank["rank"],
                )


def _assemble(
    told: list[dict[str, Any]], files: dict[str, WrittenFile], where: str
) -> tuple[Metadata, dict[str, FileEntry]]:
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    items: dict[str, list[Item]] = {}
    for rank in told:
        file = names.shard_name(rank["rank"])
        spans = files[file].spans if file in files else ()
        if len(spans) != len(rank["slots"]) + len(rank["object_names"]):
            raise CheckpointSaveError(
                f"{where}/{file}: what was written is not what was planned", path=where, file=file
            )
        for slot, span in zip(rank["slots"], spans, strict=False):
            tensor_names, dtype, shape, offsets, sizes, head_bytes, data_bytes = slot
            for name in tensor_names:
                _add_chunk(tensors, name, dtype, shape, offsets, sizes)
                places[MetadataIndex(name, offsets)] = _StorageInfo(file, span.offset, span.size_bytes)
            items.setdefault(file, []).append(
                Item(
                    name=tensor_names[0], offset=span.offset, size_bytes=span.size_bytes, crc32c=span.crc32c,
                    data_offset=span.offset + head_bytes, data_bytes=data_bytes,
                )
            )  # fmt: skip
        for name, span in zip(rank["object_names"], spans[len(rank["slots"]) :], strict=True):
            tensors[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _StorageInfo(file, span.offset, span.size_bytes)
            items.setdefault(file, []).append(
                Item(name=name, offset=span.offset, size_bytes=span.size_bytes, crc32c=span.crc32c)
            )
    _check_covered(tensors, where)
    entries = {
        name: FileEntry(size_bytes=file.size_bytes, crc32c=file.crc32c, items=tuple(items.get(name, ())))
        for name, file in files.items()
    }
    metadata = Metadata(
        state_dict_metadata=tensors,
        planner_data={name: (name,) for name in tensors},
        storage_data=places,
        storage_meta=StorageMeta(checkpoint_id=where, save_id=metadata_pickle.OUR_SAVE_ID),
    )
    return metadata, entries


def _add_chunk(
    tensors: dict[str, Any], name: str, dtype: str, shape: list[int], offsets: list[int], sizes: list[int]
) -> None:
    if name not in tensors:
        tensors[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=getattr(torch, dtype)), size=torch.Size(shape), chunks=[]
        )
    tensors[name].chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))


def _check_covered(tensors: dict[str, Any], where: str) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, BytesStorageMetadata):
            continue
        held = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if held != math.prod(tensor.size):
            raise CheckpointSaveError(
                f"{where} was not committed: the ranks wrote {held} of the {math.prod(tensor.size)} elements "
                f"of {name}.",
                path=where,
                tensor=name,
            )
