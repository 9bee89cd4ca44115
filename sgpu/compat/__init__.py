"""Notebooks written for Databricks AI Runtime run here with only their import lines changed.

    import sgpu.compat as serverless_gpu                 # was: import serverless_gpu
    from sgpu.compat import distributed, runtime         # was: from databricks.air import ...
    from sgpu.compat.data import UCVolumeDataset         # was: from serverless_gpu.data import ...

The names are those of the published guides; what is behind them is sgpu. Nothing is loaded until a name is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgpu.compat import compute, data, launcher, ray, runtime
    from sgpu.compat.compute import GPUType
    from sgpu.compat.launcher import distributed
    from sgpu.compat.ray import ray_init, ray_launch

_HOME = {
    "GPUType": "sgpu.compat.compute",
    "distributed": "sgpu.compat.launcher",
    "ray_init": "sgpu.compat.ray",
    "ray_launch": "sgpu.compat.ray",
}
_MODULES = frozenset({"compute", "data", "launcher", "ray", "runtime"})

__all__ = [
    "GPUType", "compute", "data", "distributed", "launcher", "ray", "ray_init", "ray_launch", "runtime",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"sgpu.compat.{name}")
    else:
        raise AttributeError(f"module 'sgpu.compat' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
