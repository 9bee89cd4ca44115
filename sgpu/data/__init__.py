"""Where batches come from: volumes, their cache, and a DataLoader that knows its position exactly.

Names only: nothing is loaded before it is used (the fetcher process lives in this package and loads no torch).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgpu.data.dataset import VolumeDataset
    from sgpu.data.dataset import VolumeDataset as UCVolumeDataset
    from sgpu.data.files import VolumeFiles
    from sgpu.data.formats.audio import AudioFiles
    from sgpu.data.formats.images import ImageFiles
    from sgpu.data.formats.lines import JsonLines, TextLines
    from sgpu.data.formats.safetensors import SafetensorsFiles
    from sgpu.data.formats.tables import TableDataset
    from sgpu.data.formats.tars import TarSamples
    from sgpu.data.loader import DataLoader
    from sgpu.data.measuring.report import LoaderReport
    from sgpu.data.measuring.stats import LoaderStats
    from sgpu.data.protocols import Checkpointable
    from sgpu.data.source import FileInfo
    from sgpu.data.together import gather_batches

    VolumeReader: Any
    VolumeWriter: Any
    UCVolumeReader: Any
    UCVolumeWriter: Any

_HOME = {
    "VolumeDataset": ("sgpu.data.dataset", "VolumeDataset"),
    "UCVolumeDataset": ("sgpu.data.dataset", "VolumeDataset"),
    "VolumeFiles": ("sgpu.data.files", "VolumeFiles"),
    "DataLoader": ("sgpu.data.loader", "DataLoader"),
    "FileInfo": ("sgpu.data.source", "FileInfo"),
    "Checkpointable": ("sgpu.data.protocols", "Checkpointable"),
    "LoaderReport": ("sgpu.data.measuring.report", "LoaderReport"),
    "LoaderStats": ("sgpu.data.measuring.stats", "LoaderStats"),
    "gather_batches": ("sgpu.data.together", "gather_batches"),
    "ImageFiles": ("sgpu.data.formats.images", "ImageFiles"),
    "AudioFiles": ("sgpu.data.formats.audio", "AudioFiles"),
    "TextLines": ("sgpu.data.formats.lines", "TextLines"),
    "JsonLines": ("sgpu.data.formats.lines", "JsonLines"),
    "TableDataset": ("sgpu.data.formats.tables", "TableDataset"),
    "TarSamples": ("sgpu.data.formats.tars", "TarSamples"),
    "SafetensorsFiles": ("sgpu.data.formats.safetensors", "SafetensorsFiles"),
    # users know these from here; they live in a sibling that this package never imports by itself
    "VolumeReader": ("sgpu.checkpoint", "VolumeReader"),
    "VolumeWriter": ("sgpu.checkpoint", "VolumeWriter"),
    "UCVolumeReader": ("sgpu.checkpoint", "VolumeReader"),
    "UCVolumeWriter": ("sgpu.checkpoint", "VolumeWriter"),
}

__all__ = [
    "AudioFiles", "Checkpointable", "DataLoader", "FileInfo", "ImageFiles", "JsonLines", "LoaderReport",
    "LoaderStats", "SafetensorsFiles", "TableDataset", "TarSamples", "TextLines", "UCVolumeDataset",
    "UCVolumeReader", "UCVolumeWriter", "VolumeDataset", "VolumeFiles", "VolumeReader", "VolumeWriter",
    "gather_batches",
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
