"""Real runs, with the fixtures of tests/run; and the warm process that cells of the fault matrix are forked from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.faults.rig.client import Warm
from tests.run.conftest import (  # noqa: F401 - fixtures, which pytest looks for here
    each_is_without_mlflow,
    left,
    members,
    nothing_runs_on,
    script,
    seconds_to_end,
    until,
)


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """The process that cells are forked from."""
    started = Warm()
    yield started
    started.close()


@pytest.fixture(scope="session")
def undisturbed(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every cell has to come to."""
    return warm.start("undisturbed", tmp_path_factory.mktemp("cells") / "undisturbed", {}).result(100)
