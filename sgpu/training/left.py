"""Loops that were left inside a step. Whether their body broke out or raised shows when the function has ended."""

from __future__ import annotations

from collections.abc import Callable

_left: list[Callable[[], None]] = []


def settle_later(settle: Callable[[], None]) -> None:
    """`settle` waits for what a loop still saves."""
    _left.append(settle)


def settle_left_loops() -> None:
    """To be called when the user's function has returned: nothing that was being saved is dropped in silence.

    Raises:
        CheckpointSaveError: a save failed, and its policy says that this ends the run.
    """
    while _left:
        _left.pop(0)()


def forget_left_loops() -> None:
    """The function was given up, and nobody asks any more how its loops' saves went."""
    _left.clear()
