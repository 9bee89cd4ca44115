"""Where batches come from: volumes, their cache, and a DataLoader that knows its position exactly.

Names only: nothing is loaded before it is used (the fetcher process lives in this package and loads no torch).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgpu.data.dataset import VolumeDataset, VolumeFiles
    from sgpu.data.dataset import VolumeDataset as UCVolumeDataset
    from sgpu.data.loader import DataLoader
    from sgpu.data.protocols import Checkpointable
    from sgpu.data.stats import LoaderStats
    from sgpu.data.together import gather_batches

    VolumeReader: Any
    VolumeWriter: Any
    UCVolumeReader: Any
    UCVolumeWriter: Any

_HOME = {
    "VolumeDataset": ("sgpu.data.dataset", "VolumeDataset"),
    "UCVolumeDataset": ("sgpu.data.dataset", "VolumeDataset"),
    "VolumeFiles": ("sgpu.data.dataset", "VolumeFiles"),
    "DataLoader": ("sgpu.data.loader", "DataLoader"),
    "Checkpointable": ("sgpu.data.protocols", "Checkpointable"),
    "LoaderStats": ("sgpu.data.stats", "LoaderStats"),
    "gather_batches": ("sgpu.data.together", "gather_batches"),
    # users know these from here; they live in a sibling that this package never imports by itself
    "VolumeReader": ("sgpu.checkpoint", "VolumeReader"),
    "VolumeWriter": ("sgpu.checkpoint", "VolumeWriter"),
    "UCVolumeReader": ("sgpu.checkpoint", "VolumeReader"),
    "UCVolumeWriter": ("sgpu.checkpoint", "VolumeWriter"),
}

__all__ = [
    "Checkpointable", "DataLoader", "LoaderStats", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter",
    "VolumeDataset", "VolumeFiles", "VolumeReader", "VolumeWriter", "gather_batches",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sgpu.data' has no attribute {name!r}")
    module, there = _HOME[name]
    value = getattr(importlib.import_module(module), there)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
