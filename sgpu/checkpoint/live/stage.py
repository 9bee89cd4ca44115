"""Copies this rank's share of the state into the segment, laid out as the very bytes of its files."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from sgpu.checkpoint.format import checksum, values
from sgpu.checkpoint.live import share
from sgpu.checkpoint.live.cuda import Pinned, SideStreams
from sgpu.checkpoint.live.parts import SKELETON, Held, Part
from sgpu.checkpoint.live.share import Share
from sgpu.checkpoint.writing.job import Echo
from sgpu.checkpoint.writing.segment import INCOMPLETE, Segment
from sgpu.contract.errors import CheckpointSaveError

RANK_FORMAT = "sgpu.rank/1"
CHANGED = "was changed after save()"


class Deferred(NamedTuple):
    """A live tensor, where it shall be copied to, and its version at the call."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    version: int


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A share whose place is known. `deferred` is not copied yet: `copy` does it, before the live tensors may change;
    `complete` adds what is not a tensor.
    """

    segment: Segment
    share: Share
    deferred: tuple[Deferred, ...]
    streams: SideStreams
    skeletons: dict[str, Any]
    rank_state: Any
    writes_objects: bool
    packer: Packer
    size_bytes: int
    echoes: tuple[Echo, ...] = ()

    def copy(self) -> None:
        """Raises CheckpointSaveError where a tensor was changed meanwhile."""
        with torch.no_grad():
            for copy in self.deferred:
                self.streams.copy(copy.source, copy.target)
            self.streams.finish()
        for copy in self.deferred:
            if copy.source._version != copy.version:
                raise CheckpointSaveError(
                    f"{copy.name} {CHANGED} and before the next optimizer step, while it was being "
                    'copied. Call before_optimizer_step() before such changes, or use staging="foreground".',
                    tensor=copy.name,
                )

    def complete(self, mark: int) -> Filled:
        """Adds the rest, and marks the segment as holding all of it."""
        objects = {name: self.packer.pack(name, skeleton) for name, skeleton in self.skeletons.items()}
        own = sorted(objects) if self.writes_objects else []
        rank_content = b"" if self.rank_state is None else values.to_bytes(self.rank_state)
        tail = [*(objects[name] for name in own), rank_content]
        start = self.share.layout.size_bytes
        self.segment.reserve(start + sum(map(len, tail)))
        for content in tail:
            self.segment.write(start, content)
            start += len(content)
        self.segment.mark = mark
        return Filled(
            objects={name.removesuffix(f".{SKELETON}"): checksum.text(checksum.of(c)) for name, c in objects.items()},
            own_objects=tuple((name, len(objects[name])) for name in own),
            rank_bytes=len(rank_content),
        )


@dataclass(frozen=True, kw_only=True)
class Filled:
    """What `SaveJob` tells of what is not a tensor."""

    objects: dict[str, str]
    own_objects: tuple[tuple[str, int], ...]
    rank_bytes: int


def object_name(part: str) -> str:
    return f"{part}.{SKELETON}"


class Packer:
    """`values.to_bytes` of what changes seldom: done anew only where it did."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, bytes]] = {}

    def pack(self, name: str, skeleton: Any) -> bytes:
        key = pickle.dumps(skeleton, pickle.HIGHEST_PROTOCOL)
        known = self._known.get(name)
        if known is None or known[0] != key:
            known = self._known[name] = (key, values.to_bytes(skeleton))
        return known[1]


class Stager:
    """Plans once for as long as the state keeps its shape; the heads and tails of the files are then in place."""

    def __init__(
        self, parts: list[Part], per_rank: Mapping[str, Any], rank: int, world_size: int, segment: Segment
    ) -> None:
        self._parts = parts
        self._per_rank = per_rank
        self._rank = rank
        self._world_size = world_size
        self._segment = segment
        self._packer = Packer()
        self._signature: tuple[Any, ...] = ()
        self._share: Share | None = None
        self._pinned = Pinned()
        self._targets: list[tuple[str, torch.Tensor, bool]] = []

    def stage(self, *, deferring: bool = False) -> Staged:
        """The values as they are now; the caller may change everything afterwards, but for what is deferred."""
        tensors: dict[str, Held] = {}
        skeletons: dict[str, Any] = {}
        for part in self._parts:
            state = part.collect()
            for name in state.tensors.keys() & tensors.keys():
                raise CheckpointSaveError(f"two tensors of the state have the name {name}; rename one", tensor=name)
            tensors.update(state.tensors)
            skeletons[object_name(part.name)] = state.skeleton
        rank_state = self._rank_state()
        self._segment.mark = INCOMPLETE
        locals_ = {name: share.local_part(held.tensor) for name, held in tensors.items()}
        planned = self._plan(tensors, locals_)
        streams = SideStreams(locals_.values())
        return Staged(
            segment=self._segment,
            share=planned,
            deferred=self._copy(deferring, locals_, streams),
            streams=streams,
            skeletons=skeletons,
            rank_state=rank_state,
            writes_objects=self._rank == 0,
            packer=self._packer,
            size_bytes=planned.layout.size_bytes,
            echoes=tuple(
                (echo.names[0], echo.chunk.offsets, share.checksum_of(echo, locals_[echo.names[0]]))
                for echo in planned.echoes
            ),
        )

    def close(self) -> None:
        self._pinned.release()

    def forget(self) -> None:
        """The segment was used for something else: what is in place there is put there again."""
        self._share, self._signature = None, ()

    def _plan(self, tensors: dict[str, Held], locals_: dict[str, torch.Tensor]) -> Share:
        signature = tuple(
            (name, share.identity(held.tensor, locals_[name]), held.spread) for name, held in tensors.items()
        )
        if self._share is None or signature != self._signature:
            self._share = share.plan(tensors, self._rank, self._world_size)
            self._frame(self._share, tensors, any(local.is_cuda for local in locals_.values()))
            self._signature = signature
        return self._share

    def _frame(self, planned: Share, tensors: dict[str, Held], pinned: bool) -> None:
        """Puts in place what surrounds the tensors, and notes for each its name, place, and whether it may wait."""
        self._segment.reserve(planned.layout.size_bytes + 65536)  # room for what is not a tensor
        memory = torch.frombuffer(self._segment.view(), dtype=torch.uint8)
        if pinned:
            self._pinned.pin(memory)
        self._targets = []
        for slot in planned.slots:
            self._segment.write(slot.start, slot.around.head)
            self._segment.write(slot.data_start + slot.around.data_bytes, slot.around.tail)
            if slot.around.data_bytes:
                target = memory[slot.data_start : slot.data_start + slot.around.data_bytes]
                self._targets.append((slot.names[0], target, all(tensors[name].spread for name in slot.names)))

    def _rank_state(self) -> Any:
        if not self._per_rank:
            return None
        state = {
            name: values.encode(thing.state_dict(), values.keep_tensor, (name,))
            for name, thing in self._per_rank.items()
        }
        return {"format": RANK_FORMAT, "rank": self._rank, "state": state}

    def _copy(self, deferring: bool, locals_: dict[str, torch.Tensor], streams: SideStreams) -> tuple[Deferred, ...]:
        deferred = []
        with torch.no_grad():
            for name, target, may_wait in self._targets:
                local = locals_[name]
                if deferring and may_wait and not local.is_inference():
                    deferred.append(Deferred(name=name, source=local, target=target, version=local._version))
                else:
                    streams.copy(local, target)
            streams.finish()
        return tuple(deferred)
