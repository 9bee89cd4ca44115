"""Ranks whose data cannot be counted stop together, when the first of them runs out.

Else the ranks with more data would wait in their next collective until it times out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from sgpu.contract.errors import PositionError


def is_needed() -> bool:
    """Whether there are other ranks to agree with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def ranks_without(has_batch: bool, epoch: int) -> list[int]:
    """A collective: which ranks have no batch for this step.

    Raises:
        PositionError: the ranks are in different epochs.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.tensor([int(has_batch), epoch], device=device)
    gathered = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    told = [(bool(has), int(at)) for has, at in (row.tolist() for row in gathered)]
    epochs = {at for _, at in told}
    if len(epochs) > 1:
        each = ", ".join(f"rank {rank} in epoch {at}" for rank, (_, at) in enumerate(told))
        raise PositionError(
            f"the ranks' data are in different epochs: {each}. The state was saved just where the data of some "
            "ranks had ended and that of others had not; resume from an earlier checkpoint.",
            epochs=[at for _, at in told],
        )  # fmt: skip
    return [rank for rank, (has, _) in enumerate(told) if not has]


def left_out(short: list[int], epoch: int) -> str:
    """What is said, on all ranks, where an epoch ends for all since some had no batch; empty where none had one."""
    if len(short) == dist.get_world_size():
        return ""
    return (
        f"the data of rank {', '.join(map(str, short))} ended first in epoch {epoch}; all ranks stop there, and "
        "the rest of this epoch is left out. Give all ranks equally many batches."
    )


def gather_batches(values: Iterable[Any]) -> list[Any]:
    """A collective: one value for each batch of a loader with `evaluation=True`, from all ranks, in the data's order.

    The list is the same for any world size and on every rank; so is, to the bit, what is computed from it.

    Args:
        values: this rank's, one a batch; anything that pickles, best plain numbers (a sum and a count, say).
    """
    mine = list(values)
    if not is_needed():
        return mine
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    most = max(map(len, gathered))
    return [values[turn] for turn in range(most) for values in gathered if turn < len(values)]
