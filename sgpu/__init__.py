"""Train on many GPUs from a notebook; machines fail, the run does not.

Names only: nothing third-party is imported until a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgpu import checkpoint, compat, data, goodput, runtime, widgets
    from sgpu.contract.policies import CheckpointPolicy, RestartPolicy
    from sgpu.decorator import DistributedFunction, distributed
    from sgpu.launch.local import Local
    from sgpu.run import Run, attach, cleanup, runs
    from sgpu.training import TrainLoop, seed_everything

__version__ = "0.1.0"

_HOME = {
    "distributed": "sgpu.decorator",
    "DistributedFunction": "sgpu.decorator",
    "Run": "sgpu.run",
    "runs": "sgpu.run",
    "attach": "sgpu.run",
    "cleanup": "sgpu.run",
    "Local": "sgpu.launch.local",
    "TrainLoop": "sgpu.training",
    "seed_everything": "sgpu.training",
    "CheckpointPolicy": "sgpu.contract.policies",
    "RestartPolicy": "sgpu.contract.policies",
}
_MODULES = frozenset({"checkpoint", "compat", "data", "goodput", "runtime", "widgets"})

__all__ = [
    "CheckpointPolicy", "DistributedFunction", "Local", "RestartPolicy", "Run", "TrainLoop", "attach", "checkpoint",
    "cleanup", "compat", "data", "distributed", "goodput", "runs", "runtime", "seed_everything", "widgets",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"sgpu.{name}")
    else:
        raise AttributeError(f"module 'sgpu' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
