"""Who this worker is, under the names that the published guides use."""

from __future__ import annotations

from sgpu.runtime import (
    device,
    get_global_rank,
    get_local_rank,
    get_world_size,
    init,
    is_main,
    local_rank,
    node_rank,
    rank,
    world_size,
)

__all__ = [
    "device", "get_global_rank", "get_local_rank", "get_world_size", "init", "is_main", "local_rank", "node_rank",
    "rank", "world_size",
]  # fmt: skip
