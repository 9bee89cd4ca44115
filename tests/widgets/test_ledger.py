"""Where the time went, in words."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest

from sgpu.contract.heartbeat import Category, Page
from sgpu.widgets.reading.ledger import goodput


@pytest.mark.parametrize(("starting", "said"), [(0.0, True), (8.0, False)])
def test_a_run_that_has_mostly_started_is_told_nothing_of_its_data(
    tmp_path: pathlib.Path, starting: float, said: bool
) -> None:
    beat = replace(Page.create(tmp_path / "page", 1).beats()[0], step=20)
    spent = {Category.STARTING: starting, Category.DATA: 2.0, Category.PRODUCTIVE: 8.0 - starting}
    beat = replace(beat, seconds=tuple(spent.get(each, 0.0) for each in Category))
    found = goodput([beat], beat.ledger_since_ns, "cpu")
    assert found is not None
    assert bool(found.advice) is said
