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


def held_generators(root: object) -> list[Any]:
    """The generators of Python, NumPy and torch that an object holds, always in the same order."""
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    return [item for item in parts_of(root) if isinstance(item, kinds)]


class Draws:
    """Seeds the global generators of Python, NumPy and torch, and those that `root` holds, before each sample."""

    def __init__(self, root: object) -> None:
        self._held = held_generators(root)

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


def state_of(generator: Any) -> Any:
    """Where a generator is, as plain values and tensors."""
    if isinstance(generator, random.Random):
        return _plain(generator.getstate())
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    return generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Puts a generator where `state_of` found one of the same kind."""
    if isinstance(generator, random.Random):
        version, internal, gauss = state
        generator.setstate((version, tuple(internal), gauss))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return _plain(value.tolist()) if isinstance(value, np.ndarray | np.generic) else value


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
