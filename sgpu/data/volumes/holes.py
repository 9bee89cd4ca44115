"""Files with holes: where their data are, so that what was never written is neither read nor copied nor summed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from sgpu.data.volumes.entry import CHUNK_BYTES

_BITS = 32
_CASTAGNOLI = 0x82F63B78


def stretches(source: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Where an open file holds data, as (start, stop); the rest are holes, which read as zeros and take no room."""
    if os.fstat(source).st_blocks * 512 >= size_bytes or size_bytes < CHUNK_BYTES:
        yield 0, size_bytes
        return
    at = 0
    while at < size_bytes:
        try:
            start = os.lseek(source, at, os.SEEK_DATA)
        except OSError as problem:
            if problem.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            start, at = at, size_bytes  # a mount that knows no holes
        else:
            at = os.lseek(source, start, os.SEEK_HOLE)
        yield start, min(at, size_bytes)


def crc_after_zeros(crc: int, zeros: int) -> int:
    """A CRC-32C once so many zero bytes more have gone into it, in the time of their number's logarithm.

    A zero bit is a linear map of the register; squaring it gives that of two, four, ... (as zlib's crc32_combine does).
    """
    if zeros == 0:
        return crc
    register = crc ^ 0xFFFFFFFF
    a_bit = [_CASTAGNOLI, *(1 << bit for bit in range(_BITS - 1))]
    many = _twice(_twice(_twice(a_bit)))  # a byte
    while zeros:
        if zeros & 1:
            register = _times(many, register)
        many, zeros = _twice(many), zeros >> 1
    return register ^ 0xFFFFFFFF


def _times(matrix: list[int], vector: int) -> int:
    found = 0
    for row in matrix:
        if vector & 1:
            found ^= row
        vector >>= 1
    return found


def _twice(matrix: list[int]) -> list[int]:
    return [_times(matrix, row) for row in matrix]
