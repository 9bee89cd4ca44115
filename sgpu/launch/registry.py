"""Back-ends by name."""

from __future__ import annotations

from typing import cast

from sgpu.contract.errors import InputError
from sgpu.launch.backend import Backend
from sgpu.launch.local import Local

_BY_NAME = {"local": Local}


def names() -> list[str]:
    """What `on=` takes by name."""
    return sorted(_BY_NAME)


def find(on: object) -> Backend:
    """The back-end that `on=` means.

    Raises:
        InputError: unknown; lists the known ones.
    """
    if isinstance(on, str):
        if on not in _BY_NAME:
            raise InputError(f"on={on!r}: unknown back-end; known are {', '.join(names())}")
        return _BY_NAME[on]()
    if all(hasattr(on, name) for name in ("name", "machine", "command", "start")) and not isinstance(on, type):
        return cast(Backend, on)
    raise InputError(f"on= takes the name of a back-end ({', '.join(names())}) or a back-end object; found {on!r}")
