"""Who this worker is, and joining the process group.

Environment first, `torch.distributed` second, one process last.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sgpu import settings
from sgpu.contract.errors import InputError
from sgpu.contract.heartbeat import NAME_BYTES, Page, Section, Slot
from sgpu.contract.rundir import RunDir

if TYPE_CHECKING:
    import torch

_OWN_LIMITS = {"checkpoint": Section.CHECKPOINT, "evaluation": Section.EVALUATION}
_declared_seconds = _waited_seconds = 0.0


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


@contextmanager
def section(name: str, limit_seconds: float | None = None) -> Iterator[None]:
    """Declares work that takes longer than a step, so that it is not taken for a hang: `with section("evaluation"):`.

    Inside a training loop, before or after it. It may be on one rank only: the others may wait for it so long. The name
    is told where the rank does hang there. Sections nest; without an agent they do nothing.

    Args:
        name: "evaluation", "checkpoint", or one of your own, of 24 bytes at most.
        limit_seconds: how long it may take; None: as `RestartPolicy(section_seconds=...)` says, else as a checkpoint.

    Raises:
        InputError: a name or a limit that cannot be used.
    """
    global _declared_seconds
    taken = isinstance(name, str) and name.upper() in Section.__members__ and name not in _OWN_LIMITS
    if not isinstance(name, str) or not 0 < len(name.encode()) <= NAME_BYTES or taken:
        raise InputError(
            f"section(name=...) must be a name of 1 to {NAME_BYTES} bytes that is not one of the loop's own sections; "
            f"found {name!r}"
        )
    if limit_seconds is not None and not (isinstance(limit_seconds, (int, float)) and 0 < limit_seconds < float("inf")):
        raise InputError(f"section(limit_seconds=...) must be seconds above 0, or None; found {limit_seconds!r}")
    slot, began = _slot(), time.perf_counter()
    declared_before = _declared_seconds
    if slot is None:
        yield
        return
    outer = slot.read()
    slot.enter(_OWN_LIMITS.get(name, Section.USER), limit_seconds or 0.0, name)
    try:
        yield
    finally:
        _declared_seconds = declared_before + time.perf_counter() - began  # what is nested in it counts once
        back = _slot()  # the rank may have come further
        if back is not None:
            back.enter(outer.section, outer.section_limit_seconds, outer.section_name)


def declared_seconds() -> float:
    """What this process has spent in sections so far."""
    return _declared_seconds


@contextmanager
def waiting() -> Iterator[None]:
    """Declares a wait for other ranks: `with sgpu.runtime.waiting(): torch.distributed.all_reduce(gradient)`.

    Inside a training loop, around collectives of your own. What is inside does not count as this rank's computation, by
    which ranks that hold the others up are found. A loop whose model is neither in DistributedDataParallel nor sharded
    by `fully_shard` is looked at only where it says so of each of its waits.
    """
    global _waited_seconds
    began, before = time.perf_counter(), _waited_seconds
    try:
        yield
    finally:
        _waited_seconds = before + time.perf_counter() - began  # what is nested in it counts once


def waited_seconds() -> float:
    """What this process has said so far that it waited for other ranks."""
    return _waited_seconds


def _slot() -> Slot | None:
    """This rank's in the heartbeat page, as it is now; None where no agent reads it."""
    folder = settings.run_dir()
    if folder is None:
        return None
    return Page(RunDir(folder).node(settings.node()).heartbeat).slot(rank())
