"""Where a run has no GPU, the same training code runs: its back-end names are read as gloo, and saves in the background
keep out of the way of its collectives."""

from __future__ import annotations

import functools
from typing import Any


def without_nccl(backend: str | None) -> str | None:
    """ "cpu:gloo,cuda:nccl" and "nccl" as they can be had on a machine without CUDA; others as they are."""
    if backend is None:
        return None
    if ":" not in backend:
        return "gloo" if backend.lower() == "nccl" else backend
    parts = [part for part in backend.split(",") if not part.strip().lower().startswith("cuda:")]
    return ",".join(parts) or "gloo"


def allow_nccl_names() -> None:
    """In this process, `init_process_group` and `new_group` take NCCL's name for gloo's. Only for runs on the CPU."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for name in ("init_process_group", "new_group"):
        original = getattr(distributed_c10d, name)
        if not hasattr(original, "without_nccl"):
            replacement = _translating(original, position=0 if name == "init_process_group" else 2)
            for module in (dist, distributed_c10d):
                setattr(module, name, replacement)


def _translating(original: Any, position: int) -> Any:
    @functools.wraps(original)
    def translated(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], _told(args[position]), *args[position + 1 :])
        elif "backend" in kwargs:
            kwargs["backend"] = _told(kwargs["backend"])
        return original(*args, **kwargs)

    translated.without_nccl = True  # type: ignore[attr-defined]
    return translated


def _told(backend: Any) -> Any:
    if not isinstance(backend, str):
        return backend
    usable = without_nccl(backend)
    if usable != backend:
        print(f"sgpu: no GPU in this run; backend {backend!r} is read as {usable!r}", flush=True)
    return usable


def separate_async_saves() -> None:
    """In this process, `dcp.async_save` without a process group uses a gloo group of its own. Only for runs on the CPU.

    With "cpu:gloo,cuda:nccl" on GPUs, gradients go over NCCL and a background save over gloo. Here both would share one
    gloo group, from two threads, in an order that differs between ranks: a deadlock.
    """
    from torch.distributed import checkpoint
    from torch.distributed.checkpoint import state_dict_saver

    original = state_dict_saver.async_save
    if not hasattr(original, "separate"):
        replacement = _separate(original)
        for module in (checkpoint, state_dict_saver):
            module.async_save = replacement  # type: ignore[attr-defined]


_made: dict[str, Any] = {"world": None, "group": None}


def forget_groups() -> None:
    """The process groups were given up."""
    _made.update(world=None, group=None)


def _separate(original: Any) -> Any:
    import torch.distributed as dist

    made = _made

    @functools.wraps(original)
    def async_save(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("process_group") is None and dist.is_initialized() and dist.get_world_size() > 1:
            if made["world"] is not dist.group.WORLD:
                made["world"], made["group"] = dist.group.WORLD, dist.new_group(backend="gloo")
            kwargs["process_group"] = made["group"]
        return original(*args, **kwargs)

    async_save.separate = True  # type: ignore[attr-defined]
    return async_save
