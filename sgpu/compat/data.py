"""Loading from volumes and checkpointing to them, under the names that the published guides use."""

from __future__ import annotations

from sgpu.checkpoint import UCVolumeReader, UCVolumeWriter
from sgpu.data import Checkpointable, DataLoader, UCVolumeDataset

__all__ = ["Checkpointable", "DataLoader", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter"]
