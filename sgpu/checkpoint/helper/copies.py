"""The second tier on one node: what is staged here is copied to the neighbour, what the node before stages is kept.

Nothing of it runs before a trainer asks for it. Without torch; in the helper process.
"""

from __future__ import annotations

import functools
import threading

from sgpu import settings
from sgpu.checkpoint.helper.desk import Desk, Shelf
from sgpu.checkpoint.helper.guests import Guests, Loan, free_memory_bytes
from sgpu.checkpoint.helper.peer_wire import PeerLink
from sgpu.checkpoint.helper.peers import Node, Peers, connect
from sgpu.checkpoint.helper.replica import Copied, Copier, Failures, Offer
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.contract.errors import InputError
from sgpu.contract.events import emit
from sgpu.contract.rundir import RunDir


class Copies:
    """Order of calls: `open` for each trainer that wants it; then the others.

    Args:
        node: where this helper stands.
        desk: what is staged on this node.
        ranks: of this node, and of any other.
    """

    def __init__(self, node: Node, desk: Desk, ranks: int) -> None:
        self.node = node
        self._guests = Guests(ranks, free_memory_bytes)
        self.peers = Peers(node, self._guests, desk.images)
        self._lock = threading.Lock()
        self._told_alone = False
        self._failed_in_a_row = 0
        self._copier: Copier | None = None

    def open(self, generation: int) -> str | None:
        """Why nothing can be copied; None where it can."""
        if self.node.neighbour is None:
            reason = "this run has one node, so there is no neighbour whose memory could keep a copy"
            self._warn_once(f"peer_memory: {reason}")
            return reason
        try:
            self._open()
        except (OSError, InputError) as error:
            reason = f"node {self.node.number} cannot take part: {error}"
            self._warn_once(f"peer_memory: {reason}")
            return reason
        self._guests.note_generation(generation)
        return None

    def _open(self) -> None:
        rate = settings.peer_bytes_per_second()
        self.peers.open()
        with self._lock:
            if self._copier is None:
                self._copier = Copier(self._connect, bytes_per_second=rate, tell=self._tell)

    def _warn_once(self, message: str) -> None:
        with self._lock:
            told, self._told_alone = self._told_alone, True
        root = settings.run_dir()
        if root is not None and not told:
            emit(RunDir(root), "warning", generation=0, message=message)

    def _connect(self) -> PeerLink:
        assert self.node.neighbour is not None  # or nothing is offered
        return connect(self.node, self.node.neighbour)

    def offer(self, desk: Desk, shelf: Shelf, url: str, job: SaveJob, mark: int) -> None:
        assert self._copier is not None  # or nothing is offered
        self._copier.offer(
            Offer(
                url=url, job=job, segment=shelf.segment, mark=mark, sums=functools.partial(desk.sums, shelf, job),
                await_writing=functools.partial(desk.await_writing, shelf, job),
            )
        )  # fmt: skip

    def failures(self, rank: int) -> Failures:
        return self._copier.failures(rank) if self._copier is not None else Failures()

    def guests(self, url: str) -> list[Loan]:
        """What is kept here for the node before."""
        return self._guests.lend(url)

    def _tell(self, copied: Copied) -> None:
        """Each copy; of several in a row that fail, the first and then each that doubles their number."""
        with self._lock:
            self._failed_in_a_row = 0 if copied.error is None else self._failed_in_a_row + 1
            count = self._failed_in_a_row
        root = settings.run_dir()
        if root is None:
            return
        job, run = copied.job, RunDir(root)
        if copied.error is None:
            emit(
                run, "checkpoint_copied", generation=job.generation, rank=job.rank, step=job.step,
                node=self.node.neighbour, seconds=copied.seconds, size_bytes=job.size_bytes,
            )  # fmt: skip
        elif count & (count - 1) == 0:
            emit(
                run, "checkpoint_not_copied", generation=job.generation, rank=job.rank, step=job.step,
                node=self.node.neighbour, message=copied.error, count=count,
            )  # fmt: skip
