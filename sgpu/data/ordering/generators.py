"""Generators of random numbers of every kind, seeded, told and put back: the process' own and those of others."""

from __future__ import annotations

import contextlib
import ctypes
import random
from typing import Any

import numpy as np
import torch

from sgpu.data.ordering.order import mixed

KINDS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

_LOW_32 = 0xFFFFFFFF
_LOW_63 = 0x7FFFFFFFFFFFFFFF
_WORDS = 624
_seed_numpy, _seed_torch = np.random.seed, torch.default_generator.manual_seed


def seed_all(state: int) -> None:
    """Starts the process' own generators anew from 64 bits.

    NumPy's and torch's are one and the same algorithm over 32 bits of seed: each gets its own half.
    """
    random.seed(state)
    _seed_numpy(state >> 32)
    _seed_torch(state & _LOW_63)


def reseed(generator: object, state: int) -> None:
    """Starts a generator anew, in place, from 64 bits."""
    if isinstance(generator, random.Random):
        generator.seed(state)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(state & _LOW_32)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = _pcg64(state) if type(bits) is np.random.PCG64 else type(bits)(state).state
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(state >> 1)


def _pcg64(state: int) -> dict[str, Any]:
    """What PCG64(state).state would take 14 us for: 256 bits, those of the increment odd."""
    words = [mixed(state, number) for number in range(3)]
    return {
        "bit_generator": "PCG64", "has_uint32": 0, "uinteger": 0,
        "state": {"state": state << 64 | words[0], "inc": words[1] << 64 | words[2] | 1},
    }  # fmt: skip


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


class preserved(contextlib.AbstractContextManager[None]):
    """The process' own generators are after the block as they were before it; in it, they want to be seeded."""

    def __enter__(self) -> None:
        self._states = take()

    def __exit__(self, *_: object) -> None:
        put(self._states)


def take() -> tuple[Any, Any, torch.Tensor]:
    """Takes the states of the process' own generators away: until `put`, or a seed, they draw anything."""
    return random.getstate(), _numpy.take(), torch.get_rng_state()


def put(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    _numpy.put(states[1])
    torch.set_rng_state(states[2])


class _NumpyGlobal:
    """NumPy's own generator, taken and put back without get_state and set_state.

    These go through each of 624 words as Python objects: 90 us together, which a batch would pay. The words are copied
    where they lie instead (`ctypes.state_address`), if they are found there as get_state tells them. What get_state
    tells beside them, the second of a pair of normal draws that waits for the next, shows when a draw moves no word.
    """

    def __init__(self) -> None:
        self._bits: Any = None
        self._words: Any = None

    def _find(self) -> None:
        """Looks where the words of the present bit generator lie; None: elsewhere than thought."""
        self._bits, self._words = np.random.get_bit_generator(), None  # type: ignore[attr-defined]
        told: Any = np.random.get_state(legacy=False)
        if told["bit_generator"] == "MT19937":
            memory = (ctypes.c_uint32 * (_WORDS + 1)).from_address(self._bits.ctypes.state_address)
            words = np.ctypeslib.as_array(memory)
            if np.array_equal(words[:_WORDS], told["state"]["key"]) and words[_WORDS] == told["state"]["pos"]:
                self._words = words

    def take(self) -> Any:
        if self._bits is not np.random.get_bit_generator():  # type: ignore[attr-defined]
            self._find()
        if self._words is None:
            return np.random.get_state(legacy=False)
        words = self._words.copy()
        waiting: float | None = np.random.standard_normal()
        if self._words[_WORDS] != words[_WORDS]:  # it was a draw of its own, and left a second one
            np.random.standard_normal()
            self._words[:] = words
            waiting = None
        return words, waiting

    def put(self, state: Any) -> None:
        if isinstance(state, dict):
            np.random.set_state(state)
            return
        words, waiting = state
        if waiting is not None:
            np.random.set_state(("MT19937", words[:_WORDS], int(words[_WORDS]), 1, waiting))
            return
        np.random.seed(0)  # forgets a waiting draw
        self._words[:] = words


_numpy = _NumpyGlobal()
