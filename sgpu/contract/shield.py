"""Sections that a restart inside the process must not cut in two: its interrupt waits until they are over."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from types import TracebackType


class _Depth(threading.local):
    value = 0


_depth = _Depth()


class Shielded(ContextDecorator):
    """`with Shielded(): ...` or `@Shielded()`, nested at will.

    Around what ends by itself soon: who waits for other ranks in it is killed.
    """

    def __enter__(self) -> None:
        _depth.value += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _depth.value -= 1


def is_shielded() -> bool:
    """Whether this thread is in such a section."""
    return _depth.value > 0
