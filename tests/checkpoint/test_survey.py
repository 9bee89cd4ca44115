"""What can be restored from the memory of several nodes, and who fetches what from whom."""

from __future__ import annotations

from typing import Any

import pytest

from sgpu.checkpoint.helper.survey import Inventory, Seen, plan

A, B = "step-00000010", "step-00000020"


def has(node: int | None, *images: tuple[str, int], world: int = 2) -> Inventory:
    return Inventory(node=node, images=tuple(Seen(folder=f, rank=rank, world_size=world) for f, rank in images))


@pytest.mark.parametrize(
    ("inventories", "folder", "lacking"),
    [
        ([has(None, (B, 0), (B, 1)), has(None, (B, 0), (B, 1))], B, [{}, {}]),
        ([has(None, (B, 0), (B, 1)), has(None, (B, 1))], None, []),
        ([has(0, (B, 0)), has(1, (B, 1))], B, [{1: [1]}, {0: [0]}]),
        ([has(0), has(1, (B, 1), (B, 0))], B, [{0: [1], 1: [1]}, {}]),
        ([has(0), has(1, (B, 1), (A, 0))], None, []),
        ([has(0, (A, 1)), has(1, (B, 1), (A, 0))], A, [{0: [1]}, {1: [0]}]),
        ([has(0, (A, 0), (B, 1)), has(1, (B, 1), (B, 0))], B, [{0: [1]}, {}]),
        ([has(0, (B, 0)), has(None, (B, 1))], None, []),
        ([has(0, (B, 0), world=4), has(1, (B, 1), world=4)], None, []),
        ([has(0), has(1)], None, []),
    ],
    ids=["one node", "one rank lacks", "each its own", "a lost node", "not the same step", "an older one",
         "a newer one", "a node that cannot be asked", "another world", "nothing"],
)  # fmt: skip
def test_what_can_be_restored(inventories: list[Inventory], folder: str | None, lacking: list[dict[int, Any]]) -> None:
    found = [plan(inventories, rank) for rank in range(2)]
    assert [one and one.folder for one in found] == [folder, folder]
    assert [one.lacking for one in found if one is not None] == lacking
    for rank, one in enumerate(found):
        if one is not None:
            across = inventories[0].node != inventories[1].node
            assert (one.locals, one.across) == ([rank] if across else [0, 1], across)
