"""Twelve defects, put into the product one after the other: the questions of the fault matrix find each of them."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from tests.faults.rig.client import Warm
from tests.faults.rig.planted import PLANTED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(250)]
NIGHTLY = os.environ.get("NIGHTLY") == "true"


CASES = [("defect", name) for name in PLANTED] + [("control", name) for name in PLANTED if NIGHTLY]


@pytest.mark.parametrize(("which", "name"), CASES)
def test_a_defect_is_found_and_its_cell_is_well_without_it(
    which: str, name: str, warm: Warm, undisturbed: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    planted = PLANTED[name]
    arguments = {"kind": planted.kind, "moment": planted.moment, "expected": undisturbed, which: name}
    told = warm.start("struck", tmp_path / "cell", arguments).result(200)
    assert which == "defect" or told["fired"], told
    assert bool(told["problems"]) == (which == "defect"), told


def test_there_are_twelve() -> None:
    assert len(PLANTED) == 12
