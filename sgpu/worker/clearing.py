"""Clears up after a call that ended without a result, so that it can be made again in the same process."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from typing import Any

from sgpu.checkpoint.leaving import let_go_all
from sgpu.contract import process
from sgpu.training.left import forget_left_loops
from sgpu.training.preemption import forget_requests
from sgpu.worker.cpu import forget_groups


class NotHealthyError(Exception):
    """The process, or its device, is of no use any more."""


def clear_up() -> None:
    """In order: saves are handed over, loaders' workers and other children ended, process groups dropped, then what
    held them. Frames of the call must be gone before.

    Raises:
        NotHealthyError: not all could be cleared.
    """
    forget_left_loops()
    forget_requests()
    let_go_all()
    _end_children()
    _drop_groups()
    gc.collect()
    _reset_compiler()


def check_health() -> None:
    """A look at the device, where it is in use.

    Raises:
        NotHealthyError: it does not answer, or wrongly.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    try:
        ones = torch.ones(64, 64, device="cuda")
        answer = float((ones @ ones).sum())
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise NotHealthyError(f"its GPU does not work any more: {error}") from error
    if answer != 64.0**3:
        raise NotHealthyError(f"its GPU multiplies wrongly: expected {64.0**3}, found {answer}")


def _end_children() -> None:
    """torch's handler would raise for loaders' workers that end; their iterators are shut down in between."""
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    spared = _resource_tracker()
    try:
        children = [pid for pid in process.descendants(os.getpid()) if pid != spared]
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _shut_down_iterators()
        for pid in children:
            with contextlib.suppress(ChildProcessError):  # its parent has collected it, or it was a grandchild
                os.waitpid(pid, 0)
    finally:
        signal.signal(signal.SIGCHLD, handler)


def _resource_tracker() -> int | None:
    """multiprocessing's own helper: one a process, which it would miss."""
    module: Any = sys.modules.get("multiprocessing.resource_tracker")
    return module._resource_tracker._pid if module is not None else None


def _shut_down_iterators() -> None:
    gc.collect()  # those that nobody holds do it themselves
    module: Any = sys.modules.get("torch.utils.data.dataloader")
    if module is None:
        return
    for each in gc.get_objects():
        if issubclass(type(each), module._MultiProcessingDataLoaderIter):  # as in abort.py
            each._shutdown_workers()


def _drop_groups() -> None:
    distributed: Any = sys.modules.get("torch.distributed")
    forget_groups()
    if distributed is None or not distributed.is_available():
        return
    if not distributed.is_initialized():
        # One whose making was given up has been counted; peers with another count would look for it under another name.
        distributed.distributed_c10d._world.group_count = 0
        return
    try:
        distributed.destroy_process_group()
    except RuntimeError as error:
        raise NotHealthyError(f"its process group could not be dropped: {error}") from error


def _reset_compiler() -> None:
    """Graphs compiled for the functions of the call, which are others when it is made again."""
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
