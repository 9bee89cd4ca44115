"""Agreement among the ranks, over a gloo group of the checkpointer's own, from the training thread only."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from sgpu import runtime, settings
from sgpu.contract.errors import InputError

_Value = TypeVar("_Value")
MOST_THREADS = 4


class Ranks:
    """Which rank this is, and collectives. With one rank, no group is made.

    Attributes:
        threads: that this rank may use while the training waits, without being in the way of the others on its node.
    """

    def __init__(self, rank: int | None, world_size: int | None, timeout_seconds: float) -> None:
        self.rank = runtime.rank() if rank is None else rank
        self.world_size = runtime.world_size() if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise InputError(f"rank must be 0 to world_size - 1; found rank {self.rank} of {self.world_size}")
        here = settings.worker_environment()
        beside = here.local_world_size if here is not None and rank is None else self.world_size
        self.threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // beside))
        self._group: Any = None
        if self.world_size == 1:
            return
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                f"world size is {self.world_size}, but torch.distributed is not initialised. Call sgpu.runtime.init() "
                "before the checkpointer is made."
            )
        if (dist.get_rank(), dist.get_world_size()) != (self.rank, self.world_size):
            raise InputError(
                f"expected rank {dist.get_rank()} of {dist.get_world_size()}, as torch.distributed has it; "
                f"found rank {self.rank} of {self.world_size}"
            )
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    def from_first(self, value: _Value) -> _Value:
        """Rank 0's value, on every rank."""
        if self._group is None:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, group=self._group)
        return told[0]

    def gather(self, value: _Value) -> list[_Value]:
        """Every rank's value, on every rank, in rank order."""
        if self._group is None:
            return [value]
        told: list[Any] = [None] * self.world_size
        dist.all_gather_object(told, value, group=self._group)
        return told

    def subgroup(self, members: list[int]) -> Any:
        """A gloo group of some ranks, made by all ranks together; a member's to destroy."""
        return dist.new_group(members, backend="gloo")

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
