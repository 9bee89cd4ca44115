"""What the engine tells: values only. Without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A committed checkpoint that was not used, and why. It stays on disk."""

    path: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What `Checkpointer.restore` did.

    Attributes:
        step: of the checkpoint.
        path: its folder or URL.
        seconds: that restoring took.
        world_size: ranks that wrote it.
        per_rank_restored: whether each rank got its own state back; False where the world size differs, and then
            `Checkpointer.restored_per_rank(rank)` reads that of any former rank.
        metadata: what was given to `save`.
        skipped: newer checkpoints that are damaged.
        source: "volume"; "memory" where this node's helper process still held it; "peer memory" where shares came from
            the memory of other nodes.
    """

    step: int
    path: str
    seconds: float
    world_size: int
    per_rank_restored: bool
    metadata: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
    source: Literal["volume", "memory", "peer memory"] = "volume"


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """A finished save.

    Attributes:
        blocked_seconds: that the training thread waited, back-pressure included.
        save_seconds: from the call until it was durable on all ranks, or failed.
        size_bytes: that this rank wrote.
        error: None, or why there is no checkpoint of this step.
        not_copied: copies of this rank's share to a neighbour's memory (`peer_memory`) that are known to have been
            given up since the report before; training and the checkpoint itself are not concerned.
        copy_error: why, of the last one; or why nothing can be copied at all.
    """

    step: int
    path: str
    blocked_seconds: float
    save_seconds: float
    size_bytes: int
    error: str | None = None
    not_copied: int = 0
    copy_error: str | None = None
