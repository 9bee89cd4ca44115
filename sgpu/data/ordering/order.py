"""The order of an epoch: a pure function of (seed, epoch), random access, no memory.

A keyed Feistel network over the next even power of two, with cycle walking to the wanted size (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002). Only 64-bit integer arithmetic: no library's generator can change it.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_ROUNDS = 8
_SMALL = 4096


def mix(*values: int) -> int:
    """64 well-mixed bits of some whole numbers (splitmix64, Steele et al. 2014)."""
    state = _START
    for value in values:
        state = mixed(state, value)
    return state


def mixed(state: int, value: int) -> int:
    """What `mix` is with one number more: mix(a, b) == mixed(mix(a), b)."""
    state = ((state ^ (value & _MASK)) + _START) & _MASK
    state = ((state ^ (state >> 30)) * _FACTORS[0]) & _MASK
    state = ((state ^ (state >> 27)) * _FACTORS[1]) & _MASK
    return state ^ (state >> 31)


def mixed_all(state: int, values: Indices) -> list[int]:
    """The same for many numbers at once."""
    bits = (values.astype(np.uint64) ^ np.uint64(state)) + np.uint64(_START)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_FACTORS[0])
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_FACTORS[1])
    found: list[int] = (bits ^ (bits >> np.uint64(31))).tolist()
    return found


def fold(seed: int) -> int:
    """A seed of any size or sign as a signed 64-bit number; small seeds stay themselves."""
    folded = seed
    if not -(2**63) <= seed < 2**63:
        parts = []
        left = abs(seed)
        while left:
            parts.append(left & _MASK)
            left >>= 64
        folded = mix(int(seed < 0), *parts) >> 1
    return folded


def order(positions: Indices, *, samples: int, seed: int, epoch: int, shuffle: bool = True) -> Indices:
    """Which samples stand at `positions` of an epoch's order.

    Args:
        positions: int64 array, any shape, each in [0, samples).
        samples: size of the data set.

    Returns:
        int64 array of the same shape; over all positions each sample occurs once.
    """
    if not shuffle:
        return positions.astype(np.int64, copy=True)
    key = mix(fold(seed), epoch)
    if samples <= _SMALL:
        return _whole(samples, key)[positions]
    return _walk(positions.astype(np.uint64), samples, key).astype(np.int64)


@lru_cache(maxsize=8)
def _whole(samples: int, key: int) -> Indices:
    """Small sets are sorted by a keyed hash: a network over so few bits would not reach all orders evenly."""
    bits = np.arange(samples, dtype=np.uint64) ^ np.uint64(key)
    with np.errstate(over="ignore"):
        for factor in _FACTORS:
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(factor)
        bits = bits ^ (bits >> np.uint64(31))
    whole = np.argsort(bits, kind="stable").astype(np.int64)
    whole.setflags(write=False)
    return whole


def _walk(points: npt.NDArray[np.uint64], samples: int, key: int) -> npt.NDArray[np.uint64]:
    """Encrypts until every point lies inside [0, samples)."""
    half = ((samples - 1).bit_length() + 1) // 2
    keys = [np.uint64(mix(key, turn)) for turn in range(_ROUNDS)]
    found = _encrypt(points, half, keys)
    outside = np.flatnonzero(found.ravel() >= samples)
    flat = found.reshape(-1)
    while outside.size:
        again = _encrypt(flat[outside], half, keys)
        flat[outside] = again
        outside = outside[again >= samples]
    return flat.reshape(points.shape)


def _encrypt(points: npt.NDArray[np.uint64], half: int, keys: list[np.uint64]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = points >> shift, points & mask
    with np.errstate(over="ignore"):
        for key in keys:
            bits = (right ^ key) * np.uint64(_START)
            bits = (bits ^ (bits >> np.uint64(29))) * np.uint64(_FACTORS[0])
            bits = bits ^ (bits >> np.uint64(32))
            left, right = right, left ^ (bits & mask)
    found: npt.NDArray[np.uint64] = (left << shift) | right
    return found
