"""Random draws as a function of (seed, epoch, position): the same whoever fetches the sample, and whenever."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from sgpu.data.order import mix

_DEEPEST = 8
_LONGEST = 64
_PLAIN = (str, bytes, int, float, bool, type(None), torch.Tensor, np.ndarray)


def parts_of(root: object) -> Iterator[object]:
    """`root` and what its attributes, lists, tuples and dicts hold, each object once."""
    seen: set[int] = set()
    todo: deque[tuple[object, int]] = deque([(root, 0)])
    while todo:
        item, depth = todo.popleft()
        if id(item) in seen or isinstance(item, (*_PLAIN, type)):
            continue
        seen.add(id(item))
        yield item
        if depth < _DEEPEST:
            todo.extend((inner, depth + 1) for inner in _inside(item))


def _inside(item: object) -> list[object]:
    if isinstance(item, dict):
        return list(islice(item.values(), _LONGEST))
    if isinstance(item, list | tuple):
        return list(item[:_LONGEST])  # a longer one holds samples, perhaps millions
    if isinstance(
        item, torch.nn.Module | random.Random | np.random.Generator | np.random.RandomState | torch.Generator
    ):
        return []
    return list(getattr(item, "__dict__", {}).values())


class Draws:
    """Seeds the global generators of Python, NumPy and torch, and those that `root` holds, before each sample."""

    def __init__(self, root: object) -> None:
        kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
        self._held = [item for item in parts_of(root) if isinstance(item, kinds)]

    def begin(self, *key: int) -> None:
        """From here on draws depend on `key` alone."""
        self.begin_global(*key)
        if self._held:
            self.begin_held(*key)

    def begin_global(self, *key: int) -> None:
        state = mix(*key)
        random.seed(state)
        np.random.seed(mix(state, 1) & 0xFFFFFFFF)
        torch.default_generator.manual_seed(mix(state, 2) >> 1)

    def begin_held(self, *key: int) -> None:
        """Only those that the data set holds (workers that agree on an order by equal generators need equal keys)."""
        state = mix(*key)
        for number, generator in enumerate(self._held):
            reseed(generator, mix(state, 3 + number))


def reseed(generator: object, state: int) -> None:
    """Starts a generator anew, in place, from 64 bits."""
    if isinstance(generator, random.Random):
        generator.seed(state)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(state & 0xFFFFFFFF)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(state).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(state >> 1)


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Global generators are after the block as they were before it."""
    states = snapshot()
    try:
        yield
    finally:
        restore(states)


def snapshot() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def restore(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
