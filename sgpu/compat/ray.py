"""`ray_launch` and `ray_init`: the imports resolve, so that the refusal comes where they are used, with what to do."""

from __future__ import annotations

from typing import Any, NoReturn

from sgpu.contract.errors import InputError

_INSTEAD = (
    "sgpu starts torch workers, no Ray cluster. Put the function under @distributed(gpus=N), one call a rank, or "
    "start Ray yourself with ray.init() in the notebook."
)


def ray_launch(*_args: Any, **_options: Any) -> NoReturn:
    """Refused.

    Raises:
        InputError: always; says what to write instead.
    """
    raise InputError(f"@ray_launch is not supported: {_INSTEAD}")


def ray_init(*_args: Any, **_options: Any) -> NoReturn:
    """Refused.

    Raises:
        InputError: always; says what to write instead.
    """
    raise InputError(f"ray_init() is not supported: {_INSTEAD}")


__all__ = ["ray_init", "ray_launch"]
