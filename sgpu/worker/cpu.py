"""Where a run has no GPU, the same training code runs: its back-end names are read as gloo."""

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
