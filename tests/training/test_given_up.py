"""A loop whose call was given up while something still held it: it ends later, in the middle of the next call."""

from __future__ import annotations

import pathlib

import pytest

from sgpu.training import left
from tests.training.looping import Begin, Training


@pytest.mark.parametrize("given_up", [False, True])
def test_a_loop_that_ends_after_its_call_was_given_up_is_settled_by_nobody(
    root: pathlib.Path, supervised: Begin, given_up: bool
) -> None:
    """Its saves were handed over; to wait for them would raise in a call that has nothing to do with them."""
    _, slot = supervised()
    batches = iter(Training(root, checkpoint_every=1).loop)
    next(batches)
    left.forget_left_loops()
    if given_up:
        slot.fail(parked=False)
    batches.close()  # type: ignore[attr-defined]
    assert len(left._left) == (0 if given_up else 1)
    left.forget_left_loops()
