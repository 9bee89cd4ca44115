"""Which rank writes what, and where: computed alike by every rank, without a word between them."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import torch

from sgpu.checkpoint.format import checksum
from sgpu.checkpoint.format.envelope import Envelope, bytes_of, envelope
from sgpu.checkpoint.format.metadata_pickle import Box, Chunk
from sgpu.checkpoint.live.parts import Held
from sgpu.checkpoint.writing.job import Layout, Row
from sgpu.contract.errors import CheckpointSaveError

TensorKey = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One tensor (or this rank's shard of it) in this rank's file. Tied tensors share a slot, under all their names."""

    names: tuple[str, ...]
    dtype: str
    shape: Box
    chunk: Chunk
    start: int
    around: Envelope

    @property
    def data_start(self) -> int:
        return self.start + len(self.around.head)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What this rank writes: `layout` is the same as `slots`, in plain values.

    `echoes` are shards that this rank holds as others do, whose meshes are beside its own: those write them, and this
    one tells their checksums, so that nothing is lost where they are no copies after all.
    """

    slots: tuple[Slot, ...]
    layout: Layout
    echoes: tuple[Slot, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    names: tuple[str, ...]
    tensor: torch.Tensor
    spread: bool
    sharded: bool
    chunk: Chunk
    mine: bool
    echo: bool
    size_bytes: int


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank holds, sharing memory with the tensor."""
    if hasattr(tensor, "to_local"):
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.detach()


def local_chunk(tensor: torch.Tensor) -> Chunk:
    """Where the local part lies in the whole."""
    if not hasattr(tensor, "__create_chunk_list__"):
        return Chunk(offsets=(0,) * tensor.dim(), sizes=tuple(tensor.shape))
    if not hasattr(tensor, "placements"):
        return _ask(tensor)
    sharded: Any = tensor
    key = (sharded.device_mesh, tuple(sharded.placements), tuple(sharded.shape))
    if key not in _known_chunks:
        _known_chunks[key] = _ask(tensor)
    return _known_chunks[key]


# Few kinds of shards, and torch needs up to 0.1 s for one of a mesh of 16,384.
_known_chunks: dict[tuple[Any, ...], Chunk] = {}


def _ask(tensor: Any) -> Chunk:
    (chunk,) = tensor.__create_chunk_list__()
    return Chunk(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes))


def identity(tensor: torch.Tensor, local: torch.Tensor) -> TensorKey:
    """Equal for two names of the same memory."""
    return local.data_ptr() or id(tensor), tensor.shape, local.stride(), tensor.dtype


def plan(tensors: dict[str, Held], rank: int, world_size: int) -> Share:
    """This rank's share.

    Sharded tensors: each rank its own shard (the first of its replicas). Of tensors that all ranks hold, those that
    the training keeps equal are dealt out by size; the others go to rank 0.
    """
    candidates = _candidates(tensors, rank)
    owners = _deal(candidates, world_size)
    slots: list[Slot] = []
    start = 0
    for candidate, owner in zip(candidates, owners, strict=True):
        if candidate.mine if candidate.sharded else owner == rank:
            slots.append(_slot(candidate, start))
            start += slots[-1].around.size_bytes
    rows = tuple(
        Row(
            names=slot.names, dtype=slot.dtype, shape=slot.shape, offsets=slot.chunk.offsets, sizes=slot.chunk.sizes,
            head_bytes=len(slot.around.head), data_bytes=slot.around.data_bytes, size_bytes=slot.around.size_bytes,
        )
        for slot in slots
    )  # fmt: skip
    view = _view(candidates)
    return Share(
        slots=tuple(slots),
        layout=Layout(
            id=f"{view}-{checksum.text(checksum.of(repr(rows).encode()))}",
            view=view,
            rows=rows,
            tensors=len(candidates),
        ),
        echoes=tuple(_slot(candidate, 0) for candidate in candidates if candidate.echo),
    )


def _slot(candidate: _Candidate, start: int) -> Slot:
    return Slot(
        names=candidate.names,
        dtype=str(candidate.tensor.dtype).removeprefix("torch."),
        shape=tuple(candidate.tensor.shape),
        chunk=candidate.chunk,
        start=start,
        around=envelope(candidate.tensor.dtype, candidate.chunk.sizes),
    )


def checksum_of(echo: Slot, local: torch.Tensor) -> int:
    """As of the bytes that whoever writes it puts into its file."""
    value = checksum.of(bytes_of(local), checksum.of(echo.around.head))
    return checksum.of(echo.around.tail, value)


def _candidates(tensors: dict[str, Held], rank: int) -> list[_Candidate]:
    groups: dict[TensorKey, list[str]] = {}
    for name in sorted(tensors):
        tensor = tensors[name].tensor
        groups.setdefault(identity(tensor, local_part(tensor)), []).append(name)
    found = []
    for names in groups.values():
        held = tensors[names[0]]
        sharded, mine, echo = _sharding(names[0], held.tensor)
        chunk = local_chunk(held.tensor)
        found.append(
            _Candidate(
                names=tuple(names),
                tensor=held.tensor,
                spread=all(tensors[name].spread for name in names),
                sharded=sharded,
                chunk=chunk,
                mine=mine,
                echo=echo,
                size_bytes=math.prod(chunk.sizes) * held.tensor.element_size(),
            )
        )
    return sorted(found, key=lambda candidate: candidate.names)


def _sharding(name: str, tensor: torch.Tensor) -> tuple[bool, bool, bool]:
    """Whether it is sharded over a device mesh, whether this rank writes its shard, and whether it only echoes it.

    A tensor that is sharded by one dimension of a larger mesh (a norm beside tensor parallelism) is there on several
    meshes: the ranks of the one with rank 0 write it.
    """
    if not hasattr(tensor, "placements"):
        return False, True, False
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointSaveError(f"{name} holds partial sums; reduce it before it is saved.", tensor=name)
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    where = mesh.get_coordinate()
    if where is None:
        return True, False, False
    copies = zip(where, tensor.placements, strict=True)  # neither Shard nor _StridedShard is a copy
    first = all(at == 0 for at, placement in copies if placement.is_replicate())
    local_is_empty = 0 in local_chunk(tensor).sizes
    if local_is_empty:  # an empty shard is written only where the whole is empty, and then once
        first = tensor.numel() == 0 and all(at == 0 for at in where)
    writes = bool((mesh.mesh == 0).any())
    return True, first and writes, first and not writes


def _deal(candidates: list[_Candidate], world_size: int) -> list[int]:
    """Owner of each tensor: the largest first, to the rank that has least so far."""
    owners = [0] * len(candidates)
    to_first = sum(c.size_bytes for c in candidates if not c.sharded and not c.spread)
    load = [(to_first, 0), *((0, rank) for rank in range(1, world_size))]
    heapq.heapify(load)
    dealt = [i for i, candidate in enumerate(candidates) if not candidate.sharded and candidate.spread]
    for i in sorted(dealt, key=lambda i: (-candidates[i].size_bytes, candidates[i].names)):
        size, owners[i] = load[0]
        heapq.heapreplace(load, (size + candidates[i].size_bytes, owners[i]))
    return owners


def _view(candidates: list[_Candidate]) -> str:
    """A digest of what every rank must hold alike: names, shapes, dtypes."""
    told = [(c.names, tuple(c.tensor.shape), str(c.tensor.dtype), c.sharded, c.spread) for c in candidates]
    return checksum.text(checksum.of(repr(told).encode()))
