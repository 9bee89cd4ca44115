"""From the `state` that a user gives to parts, one for each entry."""

from __future__ import annotations

from typing import Any

import torch

from sgpu.checkpoint.live.module_part import ModulePart
from sgpu.checkpoint.live.optimizer_part import OptimizerPart, is_standard
from sgpu.checkpoint.live.parts import SKELETON, ContainerPart, Part, StatefulPart
from sgpu.contract.errors import InputError


def take_apart(state: dict[str, Any], replicated: frozenset[str] = frozenset()) -> list[Part]:
    """A part for each entry of `state`.

    Raises:
        InputError: an entry is nothing that could be restored, or a name is not usable.
    """
    if not replicated <= state.keys():
        raise InputError(
            f"replicated names {sorted(replicated - state.keys())}, which are not in state: {sorted(state)}"
        )
    found: list[Part] = []
    modules: dict[str, torch.nn.Module] = {}
    for name, thing in state.items():
        if not isinstance(name, str) or not name or name == SKELETON:
            raise InputError(f"state: expected names (non-empty text); found {name!r}")
        if isinstance(thing, torch.nn.Module):
            modules[name] = thing
            found.append(ModulePart(name, thing))
        elif isinstance(thing, torch.optim.Optimizer) and is_standard(thing):
            found.append(OptimizerPart(name, thing, modules))
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            found.append(StatefulPart(name, thing, replicated=name in replicated))
        elif isinstance(thing, (dict, list, torch.Tensor)):
            found.append(ContainerPart(name, thing, replicated=name in replicated))
        else:
            raise InputError(
                f"state[{name!r}] is a {type(thing).__name__}, which cannot be restored in place. Give an object with "
                "state_dict() and load_state_dict(), or put the value into a dictionary."
            )
    return found
