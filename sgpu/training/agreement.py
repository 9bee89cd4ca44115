"""Small decisions that all ranks take alike, over a gloo group of their own."""

from __future__ import annotations

from typing import Any


class Agreement:
    """Without a process group every answer is this process' own."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo")

    def from_main(self, value: int) -> int:
        """Rank 0's number, on every rank. A collective."""
        if self._group is None:
            return value
        import torch
        import torch.distributed as dist

        shared = torch.tensor([value], dtype=torch.int64)
        dist.broadcast(shared, src=0, group=self._group)
        return int(shared)

    def any(self, value: bool) -> bool:
        """Whether it is so on any rank. A collective."""
        return bool(self.most(int(value)))

    def most(self, value: int) -> int:
        """The largest of all ranks' numbers. A collective."""
        if self._group is None:
            return value
        import torch
        import torch.distributed as dist

        shared = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group)
        return int(shared)
