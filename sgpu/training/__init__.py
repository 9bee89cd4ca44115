"""The resilient harness around the user's own loop."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgpu.training.divergence import DivergencePolicy
    from sgpu.training.left import settle_left_loops
    from sgpu.training.loop import TrainLoop
    from sgpu.training.preemption import Preempted
    from sgpu.training.rng import seed_everything

__all__ = ["DivergencePolicy", "Preempted", "TrainLoop", "seed_everything", "settle_left_loops"]

_HOME = {
    "DivergencePolicy": "divergence",
    "TrainLoop": "loop",
    "Preempted": "preemption",
    "seed_everything": "rng",
    "settle_left_loops": "left",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sgpu.training' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sgpu.training.{_HOME[name]}"), name)
    globals()[name] = value
    return value
