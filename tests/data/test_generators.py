"""Taking the process' generators away and putting them back leaves no trace, wherever they were."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from sgpu.data.ordering import generators
from sgpu.data.ordering.generators import preserved, seed_all


def all_states() -> tuple[Any, ...]:
    python, numpy = random.getstate(), np.random.get_state(legacy=False)
    inner: Any = numpy["state"]
    words = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in inner.items()}
    return python, words, numpy["has_gauss"], numpy["gauss"], torch.get_rng_state().tolist()


def draw(count: int) -> None:
    for _ in range(count):
        random.gauss(0, 1)
        np.random.randn(1 + count % 3)
        torch.randn(3)


@pytest.fixture
def other_bits() -> Iterator[None]:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("before", [0, 1, 2, 311, 312, 700])
@pytest.mark.parametrize("inside", [0, 1, 2, 700])
@pytest.mark.parametrize("slow", [False, True])
def test_nothing_is_seen_after(before: int, inside: int, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if slow:  # as where the words do not lie where they are thought to
        monkeypatch.setattr(generators._numpy, "_words", None)
        monkeypatch.setattr(generators._numpy, "_bits", np.random.get_bit_generator())  # type: ignore[attr-defined]
    seed_all(7)
    draw(before)
    states = all_states()
    with preserved():
        seed_all(8)
        draw(inside)
    assert all_states() == states


def test_a_waiting_normal_draw_is_kept_and_none_is_made_up() -> None:
    seen = set()
    for before in range(6):
        seed_all(9)
        np.random.randn(before)
        seen.add(all_states()[2])
        states = all_states()
        with preserved():
            seed_all(8)
            np.random.randn(1)
        assert all_states() == states
    assert seen == {0, 1}


@pytest.mark.usefixtures("other_bits")
def test_another_bit_generator_of_the_users_is_kept() -> None:
    np.random.set_bit_generator(np.random.PCG64(4))  # type: ignore[attr-defined]
    states = all_states()
    with preserved():
        np.random.random(3)
    assert all_states() == states
    np.random.set_bit_generator(np.random.MT19937(4))  # type: ignore[attr-defined]
    states = all_states()
    with preserved():
        seed_all(1)
    assert all_states() == states


def test_the_words_are_where_they_are_thought_to_be() -> None:
    """Else each batch pays 90 us; if this fails with a new NumPy, all is right but slower."""
    generators._numpy._find()
    assert generators._numpy._words is not None


def test_seeds_that_share_a_half_share_one_generator_alone() -> None:
    def draws(state: int) -> tuple[float, float, float]:
        seed_all(state)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    one, low, high = draws((5 << 32) | 6), draws((5 << 32) | 7), draws((4 << 32) | 6)
    assert [a == b for a, b in zip(one, low, strict=True)] == [False, True, False]
    assert [a == b for a, b in zip(one, high, strict=True)] == [False, False, True]
    assert draws((5 << 32) | 6) == one
