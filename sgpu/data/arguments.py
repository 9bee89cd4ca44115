"""What torch's arguments of a loader have to be: refused by name when it is made, not in the middle of a run."""

from __future__ import annotations

import operator
from typing import Any

import torch

from sgpu.contract.errors import InputError


def check_arguments(
    *,
    flags: dict[str, Any],
    functions: dict[str, Any],
    samplers: dict[str, Any],
    generator: Any,
    prefetch_factor: Any,
    timeout: Any,
) -> None:
    """Refuses what torch takes at first and fails at later, or without the argument's name, or reads as its opposite.

    Args:
        flags: name to what is to be true or false. Numbers do as ever; "no" would be true.
        functions: name to what is to be called, or None.
        samplers: name to what is to be iterated, or None.
        generator: of the order, or None.
        prefetch_factor: batches ahead of each worker, or None.
        timeout: seconds that a batch may take; 0: any.

    Raises:
        InputError: the argument, with what was expected and found.
    """
    for name, value in flags.items():
        if isinstance(value, (str, bytes)):
            raise InputError(f"{name} must be True or False; found {value!r}")
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise InputError(f"{name} must be a function or None; found {value!r}")
    for name, value in samplers.items():
        if value is not None and not hasattr(value, "__iter__") and not hasattr(value, "__getitem__"):
            raise InputError(f"{name} must be a sampler, something that gives indices, or None; found {value!r}")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise InputError(f"generator must be a torch.Generator or None; found {generator!r}. A number goes in seed=")
    if isinstance(timeout, (str, bytes)) or not hasattr(timeout, "__float__"):
        raise InputError(f"timeout must be a number of seconds, 0 for no limit; found {timeout!r}")
    if prefetch_factor is not None and not _is_whole(prefetch_factor, least=1):
        raise InputError(f"prefetch_factor must be a whole number, 1 or more, or None; found {prefetch_factor!r}")


def whole_workers(num_workers: Any) -> int:
    """The number of workers. InputError where it is none."""
    if not _is_whole(num_workers):
        raise InputError(f"num_workers must be a whole number, 0 or more, or None; found {num_workers!r}")
    return operator.index(num_workers)


def check_in_order(in_order: bool) -> None:
    """InputError for batches in the order of their arrival."""
    if not in_order:
        raise InputError(
            "in_order=False gives batches in an order that cannot be resumed exactly; leave it out, "
            "or use torch.utils.data.DataLoader"
        )


def _is_whole(value: Any, *, least: int | None = None) -> bool:
    try:
        number = operator.index(value)
    except TypeError:
        return False
    return least is None or number >= least
