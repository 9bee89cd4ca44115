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
        source: "volume", or "memory" where all ranks' helper processes still held it.
    """

    step: int
    path: str
    seconds: float
    world_size: int
    per_rank_restored: bool
    metadata: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[Skipped, ...] = ()
    source: Literal["volume", "memory"] = "volume"


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """A finished save.

    Attributes:
        blocked_seconds: that the training thread waited, back-pressure included.
        save_seconds: from the call until it was durable on all ranks, or failed.
        size_bytes: that this rank wrote.
        error: None, or why there is no checkpoint of this step.
    """

    step: int
    path: str
    blocked_seconds: float
    save_seconds: float
    size_bytes: int
    error: str | None = None
