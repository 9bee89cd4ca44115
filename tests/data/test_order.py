from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpu.data.ordering.order import fold, mix, mixed, mixed_all, order


@given(samples=st.integers(1, 20_000), seed=st.integers(-(2**80), 2**80), epoch=st.integers(0, 10**6))
def test_every_order_is_a_permutation(samples: int, seed: int, epoch: int) -> None:
    found = order(np.arange(samples, dtype=np.int64), samples=samples, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(found), np.arange(samples))


@pytest.mark.parametrize("samples", [1, 2, 1000, 4096, 4097, 100_000])
def test_random_access_agrees_with_the_whole(samples: int) -> None:
    whole = order(np.arange(samples, dtype=np.int64), samples=samples, seed=3, epoch=2)
    some = np.array([0, samples - 1, samples // 2], dtype=np.int64)
    assert np.array_equal(order(some, samples=samples, seed=3, epoch=2), whole[some])


SMALL = [9, 7, 8, 6, 2, 4, 3, 1, 5, 0]
LARGE = [487661, 380492, 954292, 157330, 614496]


def test_the_order_is_the_same_for_ever() -> None:
    """Positions in old checkpoints mean these orders: a change here breaks them."""
    assert order(np.arange(10, dtype=np.int64), samples=10, seed=7, epoch=0).tolist() == SMALL
    assert order(np.arange(5, dtype=np.int64), samples=10**6, seed=7, epoch=3).tolist() == LARGE


def test_orders_differ_by_epoch_and_seed_and_do_not_resemble_each_other() -> None:
    positions = np.arange(5000, dtype=np.int64)
    orders = [order(positions, samples=5000, seed=seed, epoch=epoch) for seed in (0, 1) for epoch in (0, 1, 2)]
    for first in range(len(orders)):
        for second in range(first):
            assert (orders[first] == orders[second]).sum() < 10
            assert abs(np.corrcoef(orders[first], orders[second])[0, 1]) < 0.06
    for found in orders:
        assert abs(np.corrcoef(found, positions)[0, 1]) < 0.06


def test_small_orders_are_even() -> None:
    """Each of the 120 orders of five things comes about equally often (chi-squared with 119 degrees of freedom)."""
    counts = collections.Counter(
        tuple(order(np.arange(5, dtype=np.int64), samples=5, seed=seed, epoch=0).tolist()) for seed in range(6000)
    )
    assert sum((counts[key] - 50) ** 2 / 50 for key in counts) + 50 * (120 - len(counts)) < 190  # p < 1e-4


def test_unshuffled_is_the_identity() -> None:
    positions = np.arange(5, dtype=np.int64)
    found = order(positions, samples=5, seed=1, epoch=1, shuffle=False)
    assert found.tolist() == [0, 1, 2, 3, 4]
    found[0] = 9
    assert positions[0] == 0


def test_seeds_of_any_size() -> None:
    assert fold(5) == 5
    assert fold(-5) == -5
    assert len({fold(2**64), fold(-(2**64)), fold(2**128), fold(2**63)}) == 4
    assert all(-(2**63) <= fold(seed) < 2**63 for seed in (2**64, -(2**200), 2**63, -(2**63)))
    assert mix(1, 2) != mix(2, 1)


def test_many_are_mixed_as_one_is() -> None:
    values = np.arange(0, 10**15, 10**13, dtype=np.int64)
    for stem in (mix(-5, 3), mix()):
        assert mixed_all(stem, values) == [mixed(stem, value) for value in values.tolist()]
    assert mixed(mix(4, -9), 6) == mix(4, -9, 6)
