"""Packages that only some formats need."""

from __future__ import annotations

import importlib
from typing import Any

from sgpu.contract.errors import InputError


def optional(module: str, *, extra: str, purpose: str) -> Any:
    """The module.

    Raises:
        InputError: it is not installed, with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise InputError(
            f'{purpose} needs the package {module.partition(".")[0]!r}: pip install "sgpu[{extra}]" ({problem})'
        ) from problem
