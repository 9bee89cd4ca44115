"""A rank's own future: which files it will want, in order, across the edges of epochs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sgpu.data.ordering.order import Indices, order
from sgpu.data.ordering.position import plan_of


@dataclass(frozen=True, kw_only=True)
class WalkPlan:
    """Everything that fixes the future of a rank but where it stands (plain JSON values)."""

    samples: int
    batch: int
    world: int
    rank: int
    seed: int
    shuffle: bool
    drop_last: bool
    dealt: bool = False
    whole: int | None = None


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """The files of one step.

    Attributes:
        end: epoch and cursor once the step is done.
    """

    end: tuple[int, int]
    numbers: Indices


def walk(plan: WalkPlan, epoch: int, cursor: int) -> Iterator[Stretch]:
    """Step after step from a position on, without an end."""
    while True:
        rest = plan_of(
            samples=plan.samples, batch=plan.batch, world=plan.world, rank=plan.rank, cursor=cursor,
            drop_last=plan.drop_last, dealt=plan.dealt, whole=plan.whole,
        )  # fmt: skip
        if cursor == 0 and rest.steps == 0:
            return
        for step in range(rest.steps):
            positions = np.arange(*rest.part(step, plan.rank), dtype=np.int64)
            yield Stretch(
                end=(epoch, rest.cursor_after(step)),
                numbers=order(positions, samples=plan.samples, seed=plan.seed, epoch=epoch, shuffle=plan.shuffle),
            )
        epoch, cursor = epoch + 1, 0
