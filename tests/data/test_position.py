from __future__ import annotations

import random

import pytest

from sgpu.contract.errors import InputError, PositionError
from sgpu.data.ordering.position import Plan


def test_parts_of_a_step_are_neighbours_of_nearly_equal_size() -> None:
    plan = Plan(samples=22, batch=4, world=3)
    assert plan.steps == 2
    assert [plan.part(0, rank) for rank in range(3)] == [(0, 4), (4, 8), (8, 12)]
    assert [plan.part(1, rank) for rank in range(3)] == [(12, 16), (16, 19), (19, 22)]
    assert [plan.cursor_after(step) for step in range(2)] == [12, 22]


def test_a_rest_too_small_for_all_ranks_joins_the_batch_before() -> None:
    plan = Plan(samples=26, batch=4, world=3)
    assert plan.steps == 2
    assert [plan.part(1, rank) for rank in range(3)] == [(12, 17), (17, 22), (22, 26)]


def test_drop_last_drops_the_rest() -> None:
    plan = Plan(samples=26, batch=4, world=3, drop_last=True)
    assert plan.steps == 2
    assert plan.part(1, 2) == (20, 24)
    assert plan.cursor_after(1) == 26


@pytest.mark.parametrize("samples", [1, 3])
def test_fewer_samples_than_ranks_are_refused_with_both_numbers(samples: int) -> None:
    with pytest.raises(InputError, match=rf"{samples} samples but there are 4 ranks"):
        Plan(samples=samples, batch=2, world=4)


def test_drop_last_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="drop everything: 3 samples"):
        Plan(samples=3, batch=1, world=4, drop_last=True)
    with pytest.raises(InputError, match="empty"):
        Plan(samples=0, batch=1)


def test_a_position_outside_and_a_rest_below_the_world_are_refused() -> None:
    with pytest.raises(PositionError, match="position is 11 but the data set has 10"):
        Plan(samples=10, batch=1, cursor=11)
    with pytest.raises(PositionError, match="2 samples of this epoch are left for 3 ranks"):
        Plan(samples=10, batch=1, world=3, cursor=8)


def test_random_kills_and_resizes_lose_and_repeat_nothing() -> None:
    for trial in range(300):
        chance = random.Random(trial)
        samples = chance.randint(1, 400)
        cursor, seen = 0, []
        while cursor < samples:
            worlds = [world for world in (1, 2, 3, 4, 5, 8) if world <= samples - cursor]
            plan = Plan(samples=samples, batch=chance.choice([1, 3, 8]), world=chance.choice(worlds), cursor=cursor)
            assert plan.steps > 0
            for step in range(min(plan.steps, chance.randint(1, 12))):
                sizes = [stop - start for start, stop in (plan.part(step, rank) for rank in range(plan.world))]
                assert max(sizes) - min(sizes) <= 1 <= min(sizes)
                for rank in range(plan.world):
                    seen += range(*plan.part(step, rank))
                cursor = plan.cursor_after(step)
        assert sorted(seen) == list(range(samples)), trial
