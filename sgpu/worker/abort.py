"""Frees threads that are stuck in a collective: its process group is given up, from another thread.

Gloo has no abort: what torch offers returns, and frees nobody. What does is half-closing the connections beneath it.
Its *listening* socket must be left alone: the process would end. NCCL has an abort of its own.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class Abort(Protocol):
    """Order of calls: `abort` from any thread, again and again until the stuck one is free."""

    def abort(self) -> None:
        """Makes every collective of this process fail that is under way. Never blocks, never raises."""


class GlooAbort:
    """Half-closes this process' TCP connections, as long as Python does not own them.

    Gloo's are not to be told from those of other native libraries (an object store's client in Rust, say), which
    connect anew. Python's own sockets (a database, a web page) are spared.
    """

    def abort(self) -> None:
        own = _pythons_own()
        for descriptor in _sockets():
            if _inode(descriptor) not in own:
                _half_close(descriptor)


class NcclAbort:
    """Aborts the communicators of all process groups that have one."""

    def abort(self) -> None:
        distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
        if distributed is None:
            return
        for group in list(distributed._world.pg_map):
            backend = _nccl_of(group, distributed)
            if backend is not None:
                try:
                    backend.abort()
                except RuntimeError:
                    continue  # it is gone, or was never connected


class AbortAll:
    """Several, one after the other."""

    def __init__(self, each: Sequence[Abort]) -> None:
        self._each = tuple(each)

    def abort(self) -> None:
        for one in self._each:
            one.abort()


def abort_here() -> Abort:
    """What this process needs: NCCL's groups first, whose ranks may wait on a GPU for those that wait in gloo."""
    return AbortAll([NcclAbort(), GlooAbort()])


def _nccl_of(group: Any, distributed: Any) -> Any:
    import torch

    kind = getattr(distributed, "ProcessGroupNCCL", None)
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:
        return None  # it has none for GPUs
    return backend if kind is not None and isinstance(backend, kind) else None


def _sockets() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        if _inode(int(name)) is not None:
            yield int(name)


def _inode(descriptor: int) -> str | None:
    """ "socket:[12345]", which names the socket whatever number it has; None for what is no socket."""
    try:
        link = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return None
    return link if link.startswith("socket:") else None


def _pythons_own() -> set[str | None]:
    # By their types: some objects answer a look at their class with a warning, which may be an error here.
    return {_inode(each.fileno()) for each in gc.get_objects() if issubclass(type(each), socket.socket)}


def _half_close(descriptor: int) -> None:
    """A connected TCP socket, not a listening one; the number may be another file's by now."""
    try:
        copy = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return
    with copy:
        try:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                return
            if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                copy.getpeername()
                copy.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # not connected
