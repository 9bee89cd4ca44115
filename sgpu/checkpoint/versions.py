"""Which software wrote a checkpoint."""

from __future__ import annotations

import platform

import torch

import sgpu


def all_versions() -> dict[str, str]:
    return {"sgpu": sgpu.__version__, "torch": torch.__version__, "python": platform.python_version()}
