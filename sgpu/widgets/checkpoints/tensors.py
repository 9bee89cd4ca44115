"""The tensors of a checkpoint as a tree of which only a window is ever drawn."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sgpu.checkpoint.format.metadata_pickle import CheckpointIndex, TensorInfo

_DIGITS = re.compile(r"(\d+)")
_OPEN_AT_FIRST = 30  # lines
_ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16, "float32": 4, "int32": 4, "uint32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the tree: a group of tensors, or a tensor.

    Attributes:
        name: in full; of a group, the prefix with its dot.
        label: what is new in this line.
        tensors: how many are below; 1 for a tensor.
        shape, dtype, shards: None while the record is still being read, and for groups.
    """

    name: str
    label: str
    depth: int
    group: bool
    opened: bool
    tensors: int
    size_bytes: int
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    shards: int | None = None


def item_bytes(dtype: str) -> int:
    return _ITEM_BYTES.get(dtype, 1)


def sizes_in(index: CheckpointIndex) -> dict[str, int]:
    """Name -> bytes by shape and dtype."""
    return {name: math.prod(info.shape) * item_bytes(info.dtype) for name, info in index.tensors.items()}


class TensorTree:
    """Names split at their dots. Costs one sort; lines are made where somebody looks.

    Args:
        sizes: name -> bytes.
        infos: shapes and dtypes, once they are known.
    """

    def __init__(self, sizes: Mapping[str, int], infos: Mapping[str, TensorInfo] | None = None) -> None:
        self._names = sorted(sizes)
        self._before = [0, *accumulate(sizes[name] for name in self._names)]
        self._infos = infos or {}
        self._opened: set[str] = set()
        self._find = ""
        self._lines: list[Line] | None = None
        self._open_some()

    @property
    def tensors(self) -> int:
        return len(self._names)

    @property
    def size_bytes(self) -> int:
        return self._before[-1]

    @property
    def opened(self) -> frozenset[str]:
        return frozenset(self._opened)

    def adopt(self, other: TensorTree) -> None:
        """Opens and finds what another tree of the same checkpoint does."""
        self._opened, self._find, self._lines = set(other._opened), other._find, None

    def lines(self) -> Sequence[Line]:
        """All lines that are not hidden in a closed group."""
        if self._lines is None:
            self._lines = self._found() if self._find else self._below("", 0, len(self._names), 0)
        return self._lines

    def toggle(self, prefix: str) -> None:
        """Opens or closes a group."""
        self._opened ^= {prefix}
        self._lines = None

    def find(self, text: str) -> None:
        """Shows only tensors whose names hold this; "" shows the tree."""
        self._find, self._lines = text.lower(), None

    def children(self, prefix: str = "", limit: int | None = None) -> list[Line]:
        """What is directly below a group; with a limit, about the first so many."""
        low = bisect_left(self._names, prefix)
        return self._children(prefix, low, self._end(prefix, low, len(self._names)), 0, limit)

    def _found(self) -> list[Line]:
        return [
            self._tensor(at, name, 0) for at, name in enumerate(self._names) if self._find in name.lower()
        ]  # fmt: skip

    def _below(self, prefix: str, low: int, high: int, depth: int) -> list[Line]:
        found: list[Line] = []
        for line in self._children(prefix, low, high, depth):
            found.append(line)
            if line.opened:
                start = bisect_left(self._names, line.name, low, high)
                end = self._end(line.name, start, high)
                found += self._below(line.name, start, end, depth + 1)
        return found

    def _children(self, prefix: str, low: int, high: int, depth: int, limit: int | None = None) -> list[Line]:
        found: list[Line] = []
        at = low
        while at < high and (limit is None or len(found) <= limit):
            name = self._names[at]
            dot = name.find(".", len(prefix) + 1)
            group = name[: dot + 1]
            end = at + 1 if dot < 0 else self._end(group, at, high)
            if end == at + 1:  # a group of one would only be one more thing to open
                found.append(self._tensor(at, name[len(prefix) :], depth))
                at = end
                continue
            found.append(
                Line(
                    name=group, label=group[len(prefix) : -1], depth=depth, group=True, opened=group in self._opened,
                    tensors=end - at, size_bytes=self._before[end] - self._before[at],
                )
            )  # fmt: skip
            at = end
        return sorted(found, key=lambda line: _natural(line.label))

    def _end(self, prefix: str, low: int, high: int) -> int:
        """Behind the last name with this prefix, which ends with a dot: "/" follows "." among characters."""
        return bisect_left(self._names, f"{prefix[:-1]}/", low, high) if prefix else high

    def _tensor(self, at: int, label: str, depth: int) -> Line:
        name, info = self._names[at], self._infos.get(self._names[at])
        return Line(
            name=name, label=label, depth=depth, group=False, opened=False, tensors=1,
            size_bytes=self._before[at + 1] - self._before[at],
            shape=info.shape if info else None, dtype=info.dtype if info else None,
            shards=len(info.chunks) if info else None,
        )  # fmt: skip

    def _open_some(self) -> None:
        """Opens groups from the top as long as what is to be seen stays short."""
        top = self.children(limit=_OPEN_AT_FIRST)
        level, shown = [line.name for line in top if line.group], len(top)
        while level and shown <= _OPEN_AT_FIRST:
            below = [line for name in level for line in self.children(name, _OPEN_AT_FIRST)]
            shown += len(below)
            if shown <= _OPEN_AT_FIRST:
                self._opened.update(level)
            level = [line.name for line in below if line.group]


def _natural(label: str) -> tuple[tuple[int, int, str], ...]:
    """layers.2 before layers.10."""
    parts = _DIGITS.split(label)
    return tuple((0, int(part), "") if part.isdecimal() and len(part) < 19 else (1, 0, part) for part in parts)
