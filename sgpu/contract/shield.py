"""Sections that a restart inside the process must not cut in two: its interrupt waits until they are over."""

from __future__ import annotations

import threading
from types import TracebackType


class _Depth(threading.local):
    value = 0


_depth = _Depth()


class Shielded:
    """`with Shielded(): ...`, nested at will, around what ends by itself soon: who waits for other ranks is killed."""

    def __enter__(self) -> None:
        _depth.value += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _depth.value -= 1


def is_shielded() -> bool:
    """Whether this thread is in such a section."""
    return _depth.value > 0
