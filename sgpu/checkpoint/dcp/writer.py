"""`VolumeWriter`: a DCP storage back-end for `dcp.save` and `dcp.async_save`."""

from __future__ import annotations

import io
import os
import pickle
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from sgpu.checkpoint import versions
from sgpu.checkpoint.format import checksum, metadata_pickle, names
from sgpu.checkpoint.format.envelope import bytes_of, envelope
from sgpu.checkpoint.format.manifest import FileEntry, Item, Manifest
from sgpu.checkpoint.format.metadata_write import DCP_VERSION
from sgpu.checkpoint.stores import trouble
from sgpu.checkpoint.stores.opening import open_store
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing.publish import check_sizes, publish
from sgpu.contract.errors import CheckpointError, CheckpointSaveError


@dataclass(frozen=True)
class _Written:
    """What one rank tells the coordinator of one item."""

    file: str
    item: Item
    file_entry: FileEntry


class VolumeWriter(StorageWriter):
    """Writes a DCP checkpoint to a folder or any fsspec URL.

    Every byte is checksummed in `manifest.json`; `.metadata`, the commit record, is published last. Stock
    `FileSystemReader` reads the shards. A folder that holds a committed checkpoint is refused, never written into:
    give each save a folder of its own. What a died save left in an uncommitted folder is replaced.

    Args:
        url: folder or URL of this one checkpoint; None where `checkpoint_id` is given to `dcp.save`.
    """

    def __init__(self, url: str | os.PathLike[str] | None = None) -> None:
        self._store: Store | None = None
        self._save_id = ""
        self.reset(url)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._store = open_store(checkpoint_id)
        self._save_id = f"{metadata_pickle.OUR_SAVE_ID} {uuid.uuid4()}"

    def __getstate__(self) -> dict[str, Any]:
        """It goes to the process that saves (`AsyncCheckpointerType.PROCESS`)."""
        if self._store is not None and self._store.url.startswith("memory:"):
            raise CheckpointError(
                f"{self._store.url} is in the memory of this process: what another process saves there could never be "
                "loaded. Save to a folder or an object store, or from a thread of this process.",
                path=self._store.url,
            )
        return self.__dict__

    @property
    def checkpoint_id(self) -> str:
        return self._place().url

    def _place(self) -> Store:
        if self._store is None:
            raise CheckpointError(
                "VolumeWriter has no place to write to: give it a folder or URL, or dcp.save a checkpoint_id."
            )
        return self._store

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "VolumeWriter publishes one commit record for all ranks and needs use_collectives=True.",
                path=self._place().url,
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        store = self._place()
        with trouble.explained(store):
            committed = names.METADATA in store.names("")
        if committed:
            raise CheckpointError(
                f"{store.url} already holds a committed checkpoint, and one is never written over another: a mix of "
                "the two could load without an error. Save into a folder of its own.",
                path=store.url,
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        result: Future[list[WriteResult]] = Future()
        result.set_result(self._write(plan, planner) if plan.items else [])
        return result

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        file = names.shard_name(plan.storage_data)
        objects = {
            item.index: _object_bytes(item, planner) for item in plan.items if item.type == WriteItemType.BYTE_IO
        }
        layout, offset = [], 0
        for item in plan.items:
            content = objects.get(item.index)
            around = None if content is not None else _envelope_of(item)
            size = around.size_bytes if around is not None else len(content or b"")
            head = len(around.head) if around is not None else 0
            layout.append((item, offset, size, offset + head if around else 0, around.data_bytes if around else 0))
            offset += size
        sums = checksum.SpanChecksums([size for _, _, size, _, _ in layout])
        with trouble.explained(self._place(), offset):
            written = self._place().put(file, _parts(plan, planner, objects), sums.see)
        if written != offset:
            raise CheckpointSaveError(
                f"{self.checkpoint_id}/{file}: {offset} bytes were planned, {written} were written.",
                path=self.checkpoint_id,
                file=file,
            )
        entry = FileEntry(size_bytes=written, crc32c=sums.whole())
        return [
            WriteResult(
                index=item.index,
                size_in_bytes=size,
                storage_data=_Written(
                    file=file,
                    item=Item(
                        name=item.index.fqn, offset=start, size_bytes=size, crc32c=span.crc32c,
                        data_offset=data_offset, data_bytes=data_bytes,
                    ),
                    file_entry=entry,
                ),
            )
            for (item, start, size, data_offset, data_bytes), span in zip(layout, sums.spans(), strict=True)
        ]  # fmt: skip

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        store = self._place()
        written: list[tuple[MetadataIndex, _Written]] = [
            (result.index, result.storage_data) for of_rank in results for result in of_rank
        ]
        metadata.storage_data = {
            index: _StorageInfo(told.file, told.item.offset, told.item.size_bytes) for index, told in written
        }
        metadata.storage_meta = StorageMeta(checkpoint_id=store.url, save_id=self._save_id)
        files: dict[str, FileEntry] = {}
        for _, told in written:
            known = files.get(told.file, told.file_entry)
            files[told.file] = replace(known, items=(*known.items, told.item))
        with trouble.explained(store):
            check_sizes(store, "", files)
        step = names.parse_step(store.url.rstrip("/").rpartition("/")[2])
        manifest = Manifest(
            step=step.step if step else None,
            attempt=step.attempt if step else 0,
            world_size=len(results),
            files=files,
            created_unix_seconds=time.time(),
            versions=versions.all_versions(),
        )
        metadata.version = DCP_VERSION  # not an argument: older torch does not know it
        with trouble.explained(store):
            publish(store, "", manifest, pickle.dumps(metadata))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))


def _envelope_of(item: WriteItem) -> Any:
    told = item.tensor_data
    if told is None:
        raise CheckpointSaveError(
            f"{item.index.fqn}: the planner gave a tensor without its shape", tensor=item.index.fqn
        )
    return envelope(told.properties.dtype, tuple(told.chunk.sizes))


def _object_bytes(item: WriteItem, planner: SavePlanner) -> bytes:
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise CheckpointSaveError(
            f"{item.index.fqn}: expected bytes, found {type(data).__name__}", tensor=item.index.fqn
        )
    return data.getvalue()


def _parts(plan: SavePlan, planner: SavePlanner, objects: dict[MetadataIndex, bytes]) -> Iterator[memoryview]:
    """What the shard consists of, a tensor at a time: at most one is copied to the host at once."""
    for item in plan.items:
        if item.index in objects:
            yield memoryview(objects[item.index])
            continue
        tensor = planner.resolve_data(item)
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointSaveError(f"{item.index.fqn}: expected a tensor", tensor=item.index.fqn)
        around, content = _envelope_of(item), bytes_of(tensor)
        if content.nbytes != around.data_bytes:
            raise CheckpointSaveError(
                f"{item.index.fqn}: {around.data_bytes} bytes were planned, the tensor has {content.nbytes}.",
                tensor=item.index.fqn,
            )
        yield memoryview(around.head)
        yield content
        yield memoryview(around.tail)
