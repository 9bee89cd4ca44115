"""`VolumeReader`: a DCP storage back-end for `dcp.load`."""

from __future__ import annotations

import io
import os
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from sgpu.checkpoint.format import dtypes, values
from sgpu.checkpoint.format.metadata_pickle import CheckpointIndex, Chunk
from sgpu.checkpoint.keeping.choose import Opened, open_checkpoint
from sgpu.checkpoint.restoring import together
from sgpu.checkpoint.restoring.ranks import Ranks
from sgpu.checkpoint.restoring.reading import ItemReader, Key
from sgpu.checkpoint.stores.opening import open_store
from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import CheckpointError, CheckpointMismatchError

# Ranks that share what they read wait so long for each other.
TIMEOUT_SECONDS = 600.0


class VolumeReader(StorageReader):
    """Reads a DCP checkpoint from a folder or any fsspec URL: our own, or one that stock DCP wrote.

    Every byte is compared with its checksum before the first tensor is overwritten (a stock checkpoint has none: it
    is read unverified). Nothing in it is run: the commit record is read by a list of allowed names, objects with
    `weights_only=True`.

    Args:
        url: folder or URL of this one checkpoint; None where `checkpoint_id` is given to `dcp.load`.
        cast: allow a tensor to be loaded into one of another dtype, which may lose bits.
        share: all ranks of torch.distributed call `dcp.load` together (not a part of them): what all of them need is
            then read, and checked, by one of them, and passed on, instead of once by each.
    """

    def __init__(self, url: str | os.PathLike[str] | None = None, *, cast: bool = False, share: bool = False) -> None:
        self._store: Store | None = None
        self._opened: Opened | None = None
        self._cast = cast
        self._share = share
        self.reset(url)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._opened = None
        if checkpoint_id is not None:
            self._store = open_store(checkpoint_id)

    @property
    def checkpoint_id(self) -> str:
        return self._place().url

    def _place(self) -> Store:
        if self._store is None:
            raise CheckpointError("VolumeReader has no place to read from: give it a folder or URL.")
        return self._store

    def _checkpoint(self) -> Opened:
        if self._opened is None:
            self._opened = open_checkpoint(self._place(), "")
        return self._opened

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return to_torch(self._checkpoint().index, self.checkpoint_id)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._checkpoint()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted = [_key(item) for item in plan.items]
        with ExitStack() as stack:
            reader = stack.enter_context(ItemReader(self._place(), self._checkpoint()))

            def check() -> None:
                for item in () if self._cast else plan.items:
                    self._check_dtype(reader, item, planner)

            if self._share and dist.is_initialized():
                ranks = Ranks(dist.get_rank(), dist.get_world_size(), TIMEOUT_SECONDS)
                stack.callback(ranks.close)
                together.prepare(ranks, reader, wanted, check, stack)
            else:
                check()
                reader.verify(wanted)
            for item in plan.items:
                if item.type == LoadItemType.BYTE_IO:
                    self._load_object(reader, item, planner)
                else:
                    _load_tensor(reader, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_dtype(self, reader: ItemReader, item: ReadItem, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            return
        name = item.storage_index.fqn
        saved, live = reader.tensor(name).dtype, str(planner.resolve_tensor(item).dtype).removeprefix("torch.")
        if saved != live:
            raise CheckpointMismatchError(
                f"{self.checkpoint_id}: {name} was saved as {saved} and would be loaded into {live}, which may lose "
                f"bits. Make the tensor {saved}, or use VolumeReader(url, cast=True).",
                path=self.checkpoint_id,
                tensor=name,
                missing=[],
                unexpected=[],
                different=[name],
            )

    def _load_object(self, reader: ItemReader, item: ReadItem, planner: LoadPlanner) -> None:
        """Hands over bytes that were found to hold plain values only (the planner reads them without that check)."""
        content = reader.read(_key(item))
        file = reader.place(_key(item)).file
        values.from_bytes(content, self.checkpoint_id, file, item.storage_index.fqn)
        planner.load_bytes(item, io.BytesIO(content))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))


def _key(item: ReadItem) -> Key:
    offset = item.storage_index.offset
    return item.storage_index.fqn, None if offset is None else tuple(offset)


def _load_tensor(reader: ItemReader, item: ReadItem, planner: LoadPlanner) -> None:
    name = item.storage_index.fqn
    offsets = tuple(item.storage_index.offset or ())
    chunk = next(chunk for chunk in reader.tensor(name).chunks if chunk.offsets == offsets)
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise CheckpointMismatchError(
            f"{name}: expected a target of shape {tuple(item.lengths)}, found {tuple(target.shape)}.", tensor=name
        )
    reader.load(name, chunk, item.storage_offsets, target)
    planner.commit_tensor(item, target)


def to_torch(index: CheckpointIndex, where: str) -> Metadata:
    """torch's own record, made by its constructors from checked plain data."""
    tensors: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=dtypes.find(info.dtype, name, where)),
            size=torch.Size(info.shape),
            chunks=[_to_chunk(chunk) for chunk in info.chunks],
        )
        for name, info in index.tensors.items()
    }
    tensors.update({name: BytesStorageMetadata() for name in index.objects})
    metadata = Metadata(
        state_dict_metadata=tensors,
        planner_data=dict(index.paths),
        storage_data={
            MetadataIndex(name, offsets): _StorageInfo(place.file, place.offset, place.size_bytes)
            for (name, offsets), place in index.places.items()
        },
        storage_meta=StorageMeta(),
    )
    metadata.version = index.version  # not an argument: older torch does not know it
    return metadata


def _to_chunk(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes))
