"""The fault matrix: every kind of fault at every moment, seven questions each. The cells are in rig/cells.py."""

from __future__ import annotations

import os
import pathlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.faults.rig import page, selection
from tests.faults.rig.cells import MOMENTS, Cell
from tests.faults.rig.client import Warm

AT_ONCE = 3  # mostly they wait
NIGHTLY = os.environ.get("NIGHTLY") == "true"
CELLS = selection.by_moment(selection.sensible() if NIGHTLY else selection.in_ci())


@pytest.mark.slow
@pytest.mark.timeout(900 if NIGHTLY else 400)
@pytest.mark.parametrize("moment", CELLS)
def test_what_happens_at_a_moment(moment: str, warm: Warm, undisturbed: dict[str, Any], tmp_path: pathlib.Path) -> None:
    def run(numbered: tuple[int, Cell]) -> dict[str, Any]:
        number, cell = numbered
        arguments = {"kind": cell.kind.name, "moment": moment, "expected": undisturbed}
        return warm.start("struck", tmp_path / f"cell{number}", arguments).result(200)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip((cell.name for cell in CELLS[moment]), pool.map(run, enumerate(CELLS[moment])), strict=True))
    wrong = {name: told for name, told in found.items() if told["problems"]}
    assert not wrong, "\n".join(f"{name}: {told}" for name, told in wrong.items())


def test_cis_cells_cover_every_kind_in_every_phase_and_every_class_at_every_moment() -> None:
    covered = set().union(*map(selection.pairs, selection.in_ci()))
    assert covered == set().union(*map(selection.pairs, selection.sensible()))
    assert len(selection.in_ci()) >= 90
    assert set(selection.by_moment(selection.in_ci())) == set(MOMENTS)


def test_the_page_is_that_of_the_table() -> None:
    assert page.PAGE.read_text() == page.text(), "run: python -m tests.faults.rig.page"
