"""From saved chunks into a live or new tensor, however either of them is cut."""

from __future__ import annotations

import math
from typing import Any

import torch

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
    local = local_part(tensor)
    for chunk, begin, at, lengths in overlaps(reader, name, tensor):
        target = local
        for dimension, (start, length) in enumerate(zip(at, lengths, strict=True)):
            target = target.narrow(dimension, start, length)
        reader.load(name, chunk, begin, target)
