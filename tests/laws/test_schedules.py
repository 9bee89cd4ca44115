"""Law 2 over random histories: data, batches, worlds and workers as they come, kills at random steps.

The order is pure, so most histories need no process: ranks are loaders in this one, and workers are what they do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sgpu.contract.errors import PositionError
from sgpu.data.dataset import shared_numbers
from sgpu.data.ordering.order import order
from sgpu.data.ordering.position import Plan
from sgpu.data.ordering.sizes import Batching, sizes_of
from sgpu.data.positions.streams import Field, PlannedStream, itself, planned


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One life of the run: a world, workers, batches a rank; it is killed after so many steps."""

    world: int
    workers: int
    batch: int
    steps: int


legs = st.builds(
    Leg, world=st.integers(1, 4), workers=st.integers(0, 3), batch=st.integers(1, 9), steps=st.integers(1, 12)
)
histories = st.lists(legs, min_size=2, max_size=5)  # one to four kills


class Numbers:
    def __getitem__(self, number: int) -> int:
        return number


def batches_of(rank: int, leg: Leg, *, samples: int, epoch: int, cursor: int, shuffle: bool, drop: bool) -> list[Any]:
    """What a rank hands out until it is killed, as its workers make it: worker w every workers-th batch from w on."""
    stream = PlannedStream(
        Numbers(), None, Batching(size=leg.batch, drop_last=drop, collate=itself), samples, shuffle,
        shared_numbers(len(Field)),
    )  # fmt: skip
    plan = Plan(samples=samples, batch=leg.batch, world=leg.world, cursor=cursor, drop_last=drop)
    count = max(1, leg.workers)
    ahead = 2 * count  # batches that workers made for nobody when they were killed
    made = [
        stream._make(batch, NoDraws(), worker, epoch)
        for worker in range(count)
        for batch in planned(
            plan,
            range(worker, min(plan.steps, leg.steps + ahead), count),
            rank=rank,
            samples=samples,
            seed=7,
            epoch=epoch,
            shuffle=shuffle,
        )
    ]
    made.sort(key=lambda envelope: envelope.number)
    return [envelope.data for envelope in made[: leg.steps]]


class NoDraws:
    def begin(self, state: int) -> None:
        """Numbers need none."""


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(samples=st.integers(1, 120), history=histories, shuffle=st.booleans(), drop=st.booleans())
def test_every_sample_is_trained_once_an_epoch(samples: int, history: list[Leg], shuffle: bool, drop: bool) -> None:
    seen: dict[int, list[int]] = {}
    epoch = cursor = 0
    lives = iter([*history[:-1], *[replace(history[-1], steps=10**6)] * 2])  # the last one is not killed
    while epoch < 2:
        leg = next(lives, history[-1])
        if not drop:
            leg = replace(leg, world=min(leg.world, samples - cursor))  # fewer samples than ranks: refused, see below
        elif cursor == 0 and samples < leg.batch * leg.world:
            leg = replace(leg, batch=1, world=1)
        plan = Plan(samples=samples, batch=leg.batch, world=leg.world, cursor=cursor, drop_last=drop)
        steps = min(plan.steps, leg.steps)
        ranks = [
            batches_of(r, leg, samples=samples, epoch=epoch, cursor=cursor, shuffle=shuffle, drop=drop)
            for r in range(leg.world)
        ]
        assert {len(batches) for batches in ranks} == {steps}, "all ranks take equally many steps"
        for step in range(steps):
            parts = [ranks[rank][step] for rank in range(leg.world)]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1 <= min(map(len, parts))
            first, last = plan.span(step)
            positions = np.arange(first, last, dtype=np.int64)
            whole = order(positions, samples=samples, seed=7, epoch=epoch, shuffle=shuffle).tolist()
            assert [number for part in parts for number in part] == whole, "a global batch is a stretch of the order"
            seen.setdefault(epoch, []).extend(whole)
        cursor = plan.cursor_after(steps - 1) if steps else samples
        if cursor == samples:
            found = seen.get(epoch, [])
            dropped = set(range(samples)) - set(found)
            assert len(found) == len(set(found)), "a sample was trained twice"
            assert not dropped or (drop and len(dropped) < leg.batch * leg.world)
            epoch, cursor = epoch + 1, 0


@settings(max_examples=100, deadline=None)
@given(samples=st.integers(5, 200), cursor=st.integers(1, 199), world=st.integers(2, 8), batch=st.integers(1, 5))
def test_a_rest_that_cannot_feed_every_rank_is_refused_by_both_numbers(
    samples: int, cursor: int, world: int, batch: int
) -> None:
    left = samples - cursor
    if 0 < left < world:
        with pytest.raises(PositionError, match=rf"{left} samples of this epoch are left for {world} ranks"):
            Plan(samples=samples, batch=batch, world=world, cursor=cursor)
    elif left >= world:
        assert Plan(samples=samples, batch=batch, world=world, cursor=cursor).steps >= 1


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(samples=st.integers(24, 200), whole=st.sampled_from([12, 24]), history=histories, drop=st.booleans())
def test_global_batches_are_the_same_for_any_history(samples: int, whole: int, history: list[Leg], drop: bool) -> None:
    """`batch` is the most that a rank takes at a time; kills come after whole global batches, as checkpoints do."""
    assume(drop or not 0 < samples % whole < 4)
    wanted = order(np.arange(samples, dtype=np.int64), samples=samples, seed=7, epoch=0).tolist()
    stop = samples - samples % whole if drop else samples
    cursor, found = 0, list[list[int]]()
    lives = iter([*history[:-1], *[replace(history[-1], steps=10**6)] * 2])
    while cursor < samples:
        leg = next(lives)
        sizes = sizes_of(leg.batch, whole, world=leg.world)
        assert sizes.batch is not None
        plan = Plan(
            samples=samples, batch=sizes.batch, world=leg.world, cursor=cursor, drop_last=drop, whole=whole
        )  # fmt: skip
        told: dict[str, Any] = {"samples": samples, "seed": 7, "epoch": 0, "shuffle": True}
        ranks = [list(planned(plan, range(plan.steps), rank=rank, **told)) for rank in range(leg.world)]
        for first in range(0, min(plan.steps, leg.steps * sizes.accumulate), sizes.accumulate):
            several = range(first, min(first + sizes.accumulate, plan.steps))
            found.append([number for step in several for rank in ranks for number in rank[step].numbers])
            cursor = plan.cursor_after(several[-1])
    assert found == [wanted[at : min(at + whole, stop)] for at in range(0, stop, whole)]
