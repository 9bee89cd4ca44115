"""Random draws as a function of (seed, epoch, position): the same whoever fetches the sample, and whenever."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from sgpu.data.ordering.generators import KINDS, reseed, seed_all
from sgpu.data.ordering.order import mixed

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
    if isinstance(item, (torch.nn.Module, *KINDS)):
        return []
    return list(getattr(item, "__dict__", {}).values())


def held_generators(root: object) -> list[Any]:
    """The generators of Python, NumPy and torch that an object holds, always in the same order."""
    return [item for item in parts_of(root) if isinstance(item, KINDS)]


class Draws:
    """Seeds the process' own generators, and those that `root` holds, before each sample, from 64 bits (`mix`)."""

    def __init__(self, root: object) -> None:
        self._held = held_generators(root)

    def begin(self, state: int) -> None:
        """From here on draws depend on `state` alone."""
        seed_all(state)
        if self._held:
            self.begin_held(state)

    def begin_held(self, state: int) -> None:
        """Only those that the data set holds (workers that agree on an order by equal generators need equal ones)."""
        for number, generator in enumerate(self._held):
            reseed(generator, mixed(state, 3 + number))
