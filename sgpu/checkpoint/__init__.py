"""Where state goes: storage, DCP reader and writer, the engine, the catalog.

Importing a name loads only what that name needs: `Catalog` and `find_latest_valid` do without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sgpu.checkpoint.dcp.reader import VolumeReader
    from sgpu.checkpoint.dcp.writer import VolumeWriter
    from sgpu.checkpoint.engine import Checkpointer
    from sgpu.checkpoint.keeping.choose import find_latest_valid
    from sgpu.checkpoint.looking.catalog import Catalog
    from sgpu.checkpoint.reports import Restored, SaveReport
    from sgpu.checkpoint.stores.opening import check_writable
    from sgpu.contract.policies import CheckpointPolicy

    UCVolumeWriter = VolumeWriter
    UCVolumeReader = VolumeReader

_HOME = {
    "Catalog": ("sgpu.checkpoint.looking.catalog", "Catalog"),
    "CheckpointPolicy": ("sgpu.contract.policies", "CheckpointPolicy"),
    "Checkpointer": ("sgpu.checkpoint.engine", "Checkpointer"),
    "Restored": ("sgpu.checkpoint.reports", "Restored"),
    "SaveReport": ("sgpu.checkpoint.reports", "SaveReport"),
    "UCVolumeReader": ("sgpu.checkpoint.dcp.reader", "VolumeReader"),
    "UCVolumeWriter": ("sgpu.checkpoint.dcp.writer", "VolumeWriter"),
    "VolumeReader": ("sgpu.checkpoint.dcp.reader", "VolumeReader"),
    "VolumeWriter": ("sgpu.checkpoint.dcp.writer", "VolumeWriter"),
    "check_writable": ("sgpu.checkpoint.stores.opening", "check_writable"),
    "find_latest_valid": ("sgpu.checkpoint.keeping.choose", "find_latest_valid"),
}

__all__ = [
    "Catalog", "CheckpointPolicy", "Checkpointer", "Restored", "SaveReport", "UCVolumeReader", "UCVolumeWriter",
    "VolumeReader", "VolumeWriter", "check_writable", "find_latest_valid",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'sgpu.checkpoint' has no attribute {name!r}")
    module, attribute = _HOME[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
