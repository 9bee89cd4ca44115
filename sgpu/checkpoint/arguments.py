"""Checks of what users give to the engine, before anything starts."""

from __future__ import annotations

import json
from typing import Any

from sgpu.contract.errors import InputError


def check_step(step: Any) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InputError(f"step must be a whole number, 0 or more; found {step!r}")


def check_staging(staging: Any) -> None:
    if staging not in ("foreground", "background", "auto"):
        raise InputError(f'staging must be "foreground", "background" or "auto"; found {staging!r}')


def check_per_rank(per_rank: dict[str, Any]) -> None:
    for name, thing in per_rank.items():
        if not all(callable(getattr(thing, method, None)) for method in ("state_dict", "load_state_dict")):
            raise InputError(
                f"per_rank[{name!r}] must have state_dict() and load_state_dict(); found a {type(thing).__name__}"
            )


def plain_json(metadata: dict[str, Any] | None) -> dict[str, Any]:
    """A copy as JSON has it."""
    try:
        copied = json.loads(json.dumps(metadata or {}))
    except (TypeError, ValueError) as error:
        raise InputError(f"metadata must be a dictionary of JSON values: {error}; found {metadata!r}") from error
    if not isinstance(copied, dict):
        raise InputError(f"metadata must be a dictionary; found {type(metadata).__name__}")
    return copied
