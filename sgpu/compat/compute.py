"""`GPUType`: accepted wherever a notebook names one; this machine's own GPUs are used whatever it says."""

from __future__ import annotations

from enum import Enum


class GPUType(str, Enum):
    """Kinds of GPU that the published guides name. Any other text is taken as well."""

    A10 = "A10"
    H100 = "H100"

    def __str__(self) -> str:
        return self.value


__all__ = ["GPUType"]
