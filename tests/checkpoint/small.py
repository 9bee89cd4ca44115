"""Small states, saved into a root by one rank, and what lies there afterwards."""

from __future__ import annotations

import pathlib
from typing import Any

import torch

from sgpu.checkpoint import Checkpointer, CheckpointPolicy
from sgpu.checkpoint.stores.posix import PosixStore


class Thing:
    """Anything with the two methods."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def box(size: int = 1000, value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((size,), float(value))}


def save(root: pathlib.Path, step: int = 1, *, per_rank: Any = None, **state: Any) -> None:
    """Written from a thread of this process; the tests of faults and ranks use the helper process."""
    with Checkpointer(CheckpointPolicy(), state, per_rank=per_rank, store=PosixStore(root)) as checkpointer:
        checkpointer.save(step)


def content(root: pathlib.Path) -> dict[str, bytes]:
    """Every file below, but for what names the attempts."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.startswith(".attempt-")
    }
