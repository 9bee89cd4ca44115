"""What starts, watches and ends workers, as the supervisor sees it: it decides, these are its hands."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgpu.contract.errors import SgpuError
from sgpu.contract.status import NodeStatus


@dataclass(frozen=True, kw_only=True)
class Exit:
    """A worker process that ended.

    Attributes:
        name: what it was started under.
        status: as os.waitpid gives it.
        out_of_memory: the kernel killed it for want of memory.
    """

    name: str
    status: int
    out_of_memory: bool = False


class WorkerHost(Protocol):
    """Order of calls: open, then per generation wait until ready (or enough `members`), room, begin, open_store,
    start ..., wait ..., stop_all; close. A generation whose workers may go on as the next one's ends with interrupt,
    wait ..., end instead of stop_all.
    """

    def open(self) -> None:
        """Makes ready to start workers; returns at once."""

    def reopen(self) -> None:
        """Makes ready again after a HostLostError."""

    def ready(self) -> bool:
        """Whether what is started now starts at once, on all nodes."""

    def members(self) -> tuple[int, ...]:
        """The nodes on which it does, once it does on all that are not lost; empty: not yet."""

    def room(self, wanted: int) -> int:
        """How many workers of those `wanted` a node takes: fewer where it is the only one, GPUs of it are left out, and
        the run may do without. Raises HostLostError where a new generation can have none."""

    def begin(self, members: tuple[int, ...]) -> None:
        """Ranks are dealt out to these nodes, in this order, until the next call. Meanwhile no worker runs, or all that
        do are parked."""

    def open_store(self, name: str) -> int:
        """Starts a store for a generation; its port. Raises HostLostError."""

    def start(
        self,
        name: str,
        *,
        rank: int,
        generation: int,
        environment: Mapping[str, str],
        log: pathlib.Path,
        parked: str | None = None,
    ) -> None:
        """Starts one worker: the process of the one that is `parked` begins anew, or where it is gone another.

        Raises HostLostError.
        """

    def wait(self, seconds: float) -> list[Exit]:
        """What ended, as soon as something did, or after `seconds`. Raises HostLostError."""

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a worker, not to what it started."""

    def stopped(self, name: str) -> bool:
        """Whether a worker stands still by a signal (SIGSTOP)."""

    def examine(self, name: str, into: pathlib.Path) -> None:
        """Has what the kernel tells of a worker added to a file, see kernel_view.py, and asks it for an answer."""

    def interrupt(self, names: Sequence[str], generation: int) -> None:
        """Tells workers to give up their calls as this generation's, and to park; returns at once."""

    def end(self, names: Sequence[str], seconds: float) -> None:
        """As stop_all, of some workers and stores, and of what ended ones have left."""

    def stop_all(self, seconds: float) -> None:
        """Ends every worker, what it started, and every store; comes back when they are gone (or after `seconds`)."""

    def nodes(self) -> tuple[NodeStatus, ...]:
        """Where each node stands, where there are several."""

    def close(self) -> None:
        """Ends everything, the zygote too, and whatever workers left behind."""


class LocalHost(WorkerHost, Protocol):
    """The workers of this machine."""

    def fileno(self) -> int:
        """Readable where `wait` would come back at once."""


def worker_name(generation: int, rank: int) -> str:
    """What a worker is started under."""
    return f"rank{rank}.g{generation}"


class HostLostError(SgpuError):
    """Workers ended with what they were started by. Facts: `node`."""


class ZygoteLostError(HostLostError):
    """The process that workers are forked from ended by itself."""


class NodeUnfitError(ZygoteLostError):
    """A node's health checks say that it cannot do the work: starting it again would not help."""

    _recurs = True


class NodeLostError(HostLostError):
    """The agent of another node is gone or silent."""


def all_lost(losses: Sequence[HostLostError]) -> HostLostError:
    """What was lost at once is one failure."""
    first = losses[0]
    return first if len(losses) == 1 else NodeLostError("; ".join(map(str, losses)), node=first.node)
