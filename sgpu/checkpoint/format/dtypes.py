"""Types of elements by the names that checkpoints hold."""

from __future__ import annotations

import functools

import torch

from sgpu.checkpoint.format.envelope import envelope
from sgpu.contract.errors import CheckpointMismatchError


def find(name: str, tensor: str, where: str = "the checkpoint") -> torch.dtype:
    """torch's own for a name such as "bfloat16".

    Raises:
        CheckpointMismatchError: this torch has none; names the tensor.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointMismatchError(
            f"{where}: {tensor} has dtype {name}, which this torch ({torch.__version__}) does not have. Load it with "
            "the torch that wrote it.",
            path=where,
            tensor=tensor,
            missing=[],
            unexpected=[],
            different=[tensor],
        )
    return found


@functools.lru_cache(maxsize=64)
def can_be_kept(dtype: torch.dtype) -> bool:
    """Whether `torch.save`, whose form each tensor has in a shard, knows it."""
    try:
        envelope(dtype, (1,))
    except (KeyError, RuntimeError, TypeError):
        return False
    return True
