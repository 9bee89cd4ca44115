"""What `TrainLoop` is given: refused by name before anything starts, and what of it beats the run's own policy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sgpu.contract.errors import InputError
from sgpu.contract.policies import CheckpointPolicy


def check_counts(*, epochs: Any, max_steps: Any, accumulate: Any, checkpoint_every: Any) -> None:
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise InputError(f"TrainLoop(epochs=...) must be a whole number, 1 or more; found {epochs!r}")
    for name, value in (("accumulate", accumulate), ("max_steps", max_steps), ("checkpoint_every", checkpoint_every)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"TrainLoop({name}=...) must be a whole number, 1 or more, or None; found {value!r}")


def check_parts(*, model: Any, optimizer: Any, loader: Any, max_steps: Any, extra: Any, checkpoints: Any) -> None:
    if hasattr(model, "param_groups"):
        raise InputError(f"TrainLoop(model=...) takes a module; found an optimizer, {type(model).__name__}")
    if hasattr(optimizer, "named_parameters"):
        raise InputError(f"TrainLoop(optimizer=...) takes an optimizer; found a module, {type(optimizer).__name__}")
    if loader is None and max_steps is None:
        raise InputError("TrainLoop needs loader=..., or max_steps=... where the loop has no loader")
    if loader is not None and not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise InputError(
            f"TrainLoop(loader=...) takes what gives batches, as sgpu.data.DataLoader(...); found {loader!r:.80} "
            f"({type(loader).__name__})"
        )
    if checkpoints is not None and not isinstance(checkpoints, (str, os.PathLike, CheckpointPolicy)):
        raise InputError(
            f"TrainLoop(checkpoints=...) takes a folder, a URL or a CheckpointPolicy; found {checkpoints!r} "
            f"({type(checkpoints).__name__})"
        )
    if extra is not None and not isinstance(extra, Mapping):
        raise InputError(f'TrainLoop(extra=...) takes parts by name, as {{"ema": ema}}; found {extra!r:.80}')
    for name, part in (extra or {}).items():
        if name in ("model", "optimizer", "scheduler"):
            raise InputError(f"TrainLoop(extra=...): the name {name!r} is taken; use another")
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise InputError(
                f"TrainLoop(extra={{{name!r}: ...}}): {part!r:.80} ({type(part).__name__}) has no state_dict and "
                "load_state_dict; wrap it in a small class that has"
            )


def choose_policy(policy: CheckpointPolicy, *, checkpoints: Any, every: Any) -> CheckpointPolicy:
    """The run's policy, unless the loop was given its own."""
    if isinstance(checkpoints, CheckpointPolicy):
        policy = checkpoints
    elif checkpoints is not None:
        policy = replace(policy, root=str(checkpoints))
    if every is not None:
        policy = replace(policy, every_steps=every, every_seconds=None)
    return policy
