"""The seed of an order: what the user gave, or else the run's, which gives way to a saved one."""

from __future__ import annotations

import operator
from typing import Any

from sgpu import settings
from sgpu.contract.errors import InputError
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import read_spec
from sgpu.data.ordering.order import fold
from sgpu.data.positions.pipeline import require_same


def seed_of(asked: int | None) -> int:
    """64 bits of what the user asked for; None: of the run's."""
    if isinstance(asked, bool | float | str):
        raise InputError(f"DataLoader(seed=...) must be a whole number or None; found {asked!r}")
    return fold(run_seed() if asked is None else operator.index(asked))


def saved_seed(state: dict[str, Any], asked: int | None) -> int:
    """The seed of a saved position.

    Raises:
        PositionError: the user asked for another.
    """
    if asked is not None:
        require_same(
            state, {"seed": fold(asked)}, "Give the loader the seed that it had, or none, or start without this state"
        )
    found: int = state["seed"]
    return found


def run_seed() -> int:
    """The seed of the run that this process belongs to, the same on every rank and after a restart; 0 outside a run."""
    folder = settings.run_dir()
    return 0 if folder is None or not RunDir(folder).spec.exists() else read_spec(RunDir(folder)).seed
