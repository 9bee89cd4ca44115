"""Copies this rank's share of the state into the segment, laid out as the very bytes of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sgpu.checkpoint import checksum, names, share, values
from sgpu.checkpoint.commit import Promise
from sgpu.checkpoint.envelope import flat_bytes
from sgpu.checkpoint.parts import SKELETON, Held, Part
from sgpu.checkpoint.segment import Segment
from sgpu.checkpoint.share import Share
from sgpu.checkpoint.write import FileJob, WriteJob
from sgpu.contract.errors import CheckpointSaveError

RANK_FORMAT = "sgpu.rank/1"


@dataclass(frozen=True, kw_only=True)
class Deferred:
    """A live tensor, where it shall be copied to, and its version at the call."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    version: int


@dataclass(frozen=True, kw_only=True)
class Staged:
    """What is to be written. `deferred` is not copied yet: `finish` does it, before the live tensors may change."""

    job: WriteJob
    promise: Promise
    deferred: tuple[Deferred, ...] = ()

    def finish(self) -> None:
        """Raises CheckpointSaveError where a tensor was changed meanwhile."""
        with torch.no_grad():
            for copy in self.deferred:
                copy.target.copy_(flat_bytes(copy.source))
        for copy in self.deferred:
            if copy.source._version != copy.version:
                raise CheckpointSaveError(
                    f"{copy.name} was changed after save() and before the next optimizer step, while it was being "
                    'copied. Call before_optimizer_step() before such changes, or use staging="foreground".',
                    tensor=copy.name,
                )

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.job.files)


def object_name(part: str) -> str:
    return f"{part}.{SKELETON}"


class Stager:
    """Plans once for as long as the state keeps its shape; the heads and tails of the files are then in place."""

    def __init__(self, parts: list[Part], per_rank: Mapping[str, Any], rank: int, world_size: int) -> None:
        self._parts = parts
        self._per_rank = per_rank
        self._rank = rank
        self._world_size = world_size
        self.segment = Segment()
        self._signature: tuple[Any, ...] = ()
        self._share = Share(slots=(), size_bytes=0, view="")
        self._framed_for: Share | None = None

    def stage(self, folder: str, *, deferring: bool = False) -> Staged:
        """The values as they are now; the caller may change everything afterwards, but for what is deferred."""
        tensors: dict[str, Held] = {}
        objects: dict[str, bytes] = {}
        for part in self._parts:
            state = part.collect()
            for name in state.tensors.keys() & tensors.keys():
                raise CheckpointSaveError(f"two tensors of the state have the name {name}; rename one", tensor=name)
            tensors.update(state.tensors)
            objects[object_name(part.name)] = values.to_bytes(state.skeleton)
        self._plan(tensors)
        own = sorted(objects) if self._rank == 0 else []
        rank_content = self._rank_content()
        start = self._share.size_bytes
        files = []
        spans = [slot.around.size_bytes for slot in self._share.slots] + [len(objects[name]) for name in own]
        end = start + sum(len(objects[name]) for name in own)
        if spans:
            files.append(FileJob(name=names.shard_name(self._rank), start=0, spans=tuple(spans)))
        if rank_content is not None:
            files.append(FileJob(name=names.rank_file(self._rank), start=end, spans=(len(rank_content),)))
        deferred = self._fill(
            deferring, tensors, [objects[name] for name in own] + ([rank_content] if rank_content else [])
        )
        promise = Promise(
            rank=self._rank,
            view=self._share.view,
            objects={name.removesuffix(f".{SKELETON}"): checksum.text(checksum.of(c)) for name, c in objects.items()},
            slots=self._share.slots,
            object_names=tuple(own),
        )
        return Staged(
            job=WriteJob(folder=folder, rank=self._rank, files=tuple(files)), promise=promise, deferred=deferred
        )

    def _plan(self, tensors: dict[str, Held]) -> None:
        signature = tuple((name, share.identity(held.tensor), held.spread) for name, held in tensors.items())
        if signature != self._signature:
            self._share = share.plan(tensors, self._rank, self._world_size)
            self._signature = signature

    def _rank_content(self) -> bytes | None:
        if not self._per_rank:
            return None
        state = {
            name: values.encode(thing.state_dict(), values.keep_tensor, (name,))
            for name, thing in self._per_rank.items()
        }
        return values.to_bytes({"format": RANK_FORMAT, "rank": self._rank, "state": state})

    def _fill(self, deferring: bool, tensors: dict[str, Held], tail: list[bytes]) -> tuple[Deferred, ...]:
        needed = self._share.size_bytes + sum(map(len, tail))
        if needed > self.segment.size_bytes:
            # Room for the small things to grow a little, so that the segment is not mapped anew at each save.
            self.segment.reserve(needed + max(65536, sum(map(len, tail))))
        if self._framed_for is not self._share:
            for slot in self._share.slots:
                self.segment.write(slot.start, slot.around.head)
                self.segment.write(slot.data_start + slot.around.data_bytes, slot.around.tail)
            self._framed_for = self._share
        deferred = []
        with torch.no_grad():
            for slot in self._share.slots:
                if not slot.around.data_bytes:
                    continue
                spread = all(tensors[name].spread for name in slot.names)
                local = share.local_part(tensors[slot.names[0]].tensor)
                target = self.segment.tensor(slot.data_start, slot.around.data_bytes)
                if deferring and spread and not local.is_inference():
                    deferred.append(Deferred(name=slot.names[0], source=local, target=target, version=local._version))
                else:
                    target.copy_(flat_bytes(local))
        start = self._share.size_bytes
        for content in tail:
            self.segment.write(start, content)
            start += len(content)
        return tuple(deferred)
