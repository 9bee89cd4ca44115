"""From saved chunks into a live or new tensor, however either of them is cut."""

from __future__ import annotations

import math
from typing import Any

import torch

from sgpu.checkpoint.format.envelope import flat_bytes
from sgpu.checkpoint.format.metadata_pickle import Place
from sgpu.checkpoint.live.share import local_chunk, local_part
from sgpu.checkpoint.restoring.reading import ItemReader, overlap
from sgpu.contract.errors import CheckpointCorruptError


def overlaps(reader: ItemReader, name: str, tensor: torch.Tensor) -> list[tuple[Any, Any, Any, Any]]:
    """(saved chunk, begin in it, begin in the local part, lengths) for all that the local part needs.

    Raises CheckpointCorruptError where the saved chunks do not cover it.
    """
    wanted = local_chunk(tensor)
    needed, held = math.prod(wanted.sizes), 0
    while True:
        found = [
            (chunk, *both)
            for chunk in reader.tensor(name).chunks
            if (both := overlap(chunk, wanted)) is not None
        ]  # fmt: skip
        held = sum(math.prod(lengths) for *_, lengths in found)
        if held == needed:
            return found
        if held > needed or not reader.widen():
            break
    raise CheckpointCorruptError(
        f"{reader.opened.path} is damaged: it holds {held} of {needed} elements of {name}.",
        path=reader.opened.path,
        tensor=name,
    )


def fill(reader: ItemReader, name: str, tensor: torch.Tensor) -> None:
    """Loads what this rank holds of a tensor."""
    _fill(reader, name, tensor, local_part(tensor))


def same_bytes(reader: ItemReader, one: str, other: str, like: torch.Tensor) -> bool:
    """Whether two saved tensors hold the same in what this rank would take of them. `like`: the live tensor."""
    if _places(reader, one, like) == _places(reader, other, like):
        return True
    local = local_part(like)
    first, second = (torch.empty(local.shape, dtype=local.dtype) for _ in range(2))
    _fill(reader, one, like, first)
    _fill(reader, other, like, second)
    return torch.equal(flat_bytes(first), flat_bytes(second))


def _places(reader: ItemReader, name: str, tensor: torch.Tensor) -> list[Place]:
    return [reader.place((name, chunk.offsets)) for chunk, *_ in overlaps(reader, name, tensor)]


def _fill(reader: ItemReader, name: str, tensor: torch.Tensor, local: torch.Tensor) -> None:
    for chunk, begin, at, lengths in overlaps(reader, name, tensor):
        target = local
        for dimension, (start, length) in enumerate(zip(at, lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        reader.load(name, chunk, begin, target)
