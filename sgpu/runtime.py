"""Who this worker is, and joining the process group.

Environment first, `torch.distributed` second, one process last.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sgpu import settings

if TYPE_CHECKING:
    import torch


def _from_group(method: str) -> int | None:
    """Asks torch.distributed if it is loaded and initialised; never loads it."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(getattr(distributed, method)())


def rank() -> int:
    """Global rank: 0 to world_size - 1."""
    told = settings.worker_environment()
    return told.rank if told else _from_group("get_rank") or 0


def world_size() -> int:
    told = settings.worker_environment()
    return told.world_size if told else _from_group("get_world_size") or 1


def local_rank() -> int:
    """Rank within this node, which is also the index of this worker's GPU."""
    told = settings.worker_environment()
    return told.local_rank if told else rank()


def node_rank() -> int:
    told = settings.worker_environment()
    return told.node_rank if told else 0


def is_main() -> bool:
    return rank() == 0


get_global_rank = rank
get_local_rank = local_rank
get_world_size = world_size


def device() -> torch.device:
    """This worker's GPU, or the CPU where there is none."""
    import torch

    return torch.device("cuda", local_rank()) if torch.cuda.is_available() else torch.device("cpu")


def init(backend: str | None = None, *, timeout_seconds: float | None = None) -> torch.device:
    """Joins the process group and binds this worker's GPU. Idempotent; a group that the user made is as good.

    Args:
        backend: as for `torch.distributed.init_process_group`; None: "cpu:gloo,cuda:nccl", or "gloo" without a GPU.
        timeout_seconds: of collectives; None: torch's default.

    Returns:
        The device to put model and batches on.
    """
    import torch
    import torch.distributed as dist

    here = device()
    if here.type == "cuda":
        torch.cuda.set_device(here)
    if dist.is_initialized() or (world_size() == 1 and settings.master_address() is None):
        return here
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if here.type == "cuda" else "gloo"
    limit: dict[str, Any] = {} if timeout_seconds is None else {"timeout": timedelta(seconds=timeout_seconds)}
    address = settings.store_address()
    restart = settings.torchrun_restart()
    if address is None and not restart:
        dist.init_process_group(backend, **limit)
        return here
    if address is None:  # torchrun's store lives on between its restarts, with the addresses of the dead in it
        store, _, _ = next(dist.rendezvous("env://", rank(), world_size()))
        prefixed = dist.PrefixStore(f"restart/{restart}", store)
    else:
        host, port = address
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        prefixed = dist.PrefixStore(f"generation/{settings.generation()}", store)
    dist.init_process_group(backend, store=prefixed, rank=rank(), world_size=world_size(), **limit)
    return here
