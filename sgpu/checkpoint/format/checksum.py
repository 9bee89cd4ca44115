"""CRC32C of files and of the items inside them, in one pass. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from crc32c import crc32c

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


@dataclass(frozen=True, kw_only=True)
class Span:
    """A checksummed range of a file."""

    offset: int
    size_bytes: int
    crc32c: int


def of(content: bytes | memoryview, start: int = 0) -> int:
    return int(crc32c(content, start))


def text(value: int) -> str:
    return f"{value:08x}"


class SpanChecksums:
    """Sees a file's pieces in order; gives the checksum of each span and of the whole.

    Spans must follow each other without a gap and cover the file.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = list(sizes)
        self._values: list[int] = []
        self._current = 0
        self._left = 0
        self._next = 0
        self._open()

    def _open(self) -> None:
        """Moves on to the next span that has bytes."""
        while self._left == 0 and self._next < len(self._sizes):
            self._left = self._sizes[self._next]
            self._next += 1
            self._current = 0
            if self._left == 0:
                self._values.append(0)

    def see(self, piece: memoryview) -> None:
        while piece.nbytes:
            if self._left == 0:
                raise ValueError(f"{piece.nbytes} bytes more than the planned {sum(self._sizes)}")
            head = piece[: self._left]
            self._current = of(head, self._current)
            self._left -= head.nbytes
            piece = piece[head.nbytes :]
            if self._left == 0:
                self._values.append(self._current)
                self._open()

    def spans(self) -> list[Span]:
        if self._left or self._next < len(self._sizes):
            raise ValueError(f"fewer bytes were written than the planned {sum(self._sizes)}")
        found, offset = [], 0
        for size, value in zip(self._sizes, self._values, strict=True):
            found.append(Span(offset=offset, size_bytes=size, crc32c=value))
            offset += size
        return found

    def whole(self) -> int:
        total = 0
        for span in self.spans():
            total = combine(total, span.crc32c, span.size_bytes)
        return total


def combine(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two stretches one after the other (the method of zlib's crc32_combine)."""
    power = 3  # the operator for 2**3 zero bits: one zero byte
    while second_bytes:
        if second_bytes & 1:
            first = _times(_zeros(power), first)
        second_bytes >>= 1
        power += 1
    return first ^ second


def _times(matrix: tuple[int, ...], vector: int) -> int:
    total, row = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector >>= 1
        row += 1
    return total


@lru_cache(maxsize=64)
def _zeros(power: int) -> tuple[int, ...]:
    """The operator that appends 2**power zero bits."""
    if power == 0:
        return (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    half = _zeros(power - 1)
    return tuple(_times(half, row) for row in half)
