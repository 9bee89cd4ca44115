"""The part of a save that the training does not wait for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field

from sgpu.checkpoint import commit, names, retention
from sgpu.checkpoint.commit import Commit
from sgpu.checkpoint.stage import Staged
from sgpu.checkpoint.storage import Store
from sgpu.checkpoint.writers import Writer
from sgpu.contract.clock import Clock
from sgpu.contract.errors import CheckpointError, CheckpointSaveError
from sgpu.contract.failpoint import failpoint
from sgpu.contract.policies import CheckpointPolicy

log = logging.getLogger("sgpu.checkpoint")


@dataclass(kw_only=True)
class Flight:
    """The save that is under way. `staged` is set when the live tensors may change; `work` gives when it was done."""

    step: int
    folder: str
    started: float
    size_bytes: int
    blocked_seconds: float = 0.0
    staged: threading.Event = field(default_factory=threading.Event)
    work: Future[float] = field(default_factory=Future)

    def start(self, action: Callable[[], float]) -> None:
        # A daemon, so that a rank whose peers are gone can end; `Checkpointer.leave` waits for it.
        threading.Thread(target=self._run, args=(action,), daemon=True, name="sgpu-checkpoint").start()

    def _run(self, action: Callable[[], float]) -> None:
        """A thread's whole life: how it ended, whatever that was, is told through the future."""
        try:
            self.work.set_result(action())
        except BaseException as error:  # noqa: BLE001
            self.work.set_exception(error)
        finally:
            self.staged.set()


class Pipeline:
    """Writes a staged share, commits it together with the other ranks', and prunes."""

    def __init__(
        self,
        store: Store,
        writer: Writer,
        policy: CheckpointPolicy,
        rank: int,
        clock: Clock,
        patience: Callable[[], float],
    ) -> None:
        self._store = store
        self._writer = writer
        self._policy = policy
        self._rank = rank
        self._clock = clock
        self._patience = patience

    def run(
        self, staged: Staged, job: Commit, flight: Flight, keep: Collection[str], damaged: Collection[str]
    ) -> float:
        """Gives the (monotonic) time at which the checkpoint existed.

        Args:
            keep: folders that pruning spares.
            damaged: folders that pruning does not count as valid.

        Raises:
            CheckpointSaveError: there is no checkpoint; the other ranks have been told.
        """
        reason: str | None = "its background thread failed"
        try:
            staged.finish()
            flight.staged.set()
            self._write_and_commit(staged, job)
            reason = None
        except (OSError, CheckpointError) as error:
            reason = str(error)
            raise CheckpointSaveError(
                f"the checkpoint of step {job.step} was not saved: {_by_rank(error, self._rank)}",
                path=f"{self._store.url}/{job.folder}",
                step=job.step,
                rank=error.facts.get("rank", self._rank) if isinstance(error, CheckpointError) else self._rank,
            ) from error
        finally:
            if reason is not None:
                self.tell_failed(job.folder, reason)
        finished = self._clock.monotonic()
        if self._rank == 0:
            self._prune({job.folder, *keep}, damaged, job.attempt)
        return finished

    def _write_and_commit(self, staged: Staged, job: Commit) -> None:
        written = self._writer.write(staged.job)
        failpoint("checkpoint.shard_written", self._rank)
        commit.tell_done(self._store, job.folder, staged.promise, written)
        failpoint("checkpoint.done", self._rank)
        if self._rank == 0:
            commit.commit(self._store, job, self._patience)
        else:
            commit.wait_for(
                self._store,
                job.folder,
                lambda found: int(names.METADATA in found),
                1,
                self._patience,
                "the commit by rank 0",
            )

    def tell_failed(self, folder: str, reason: str) -> None:
        """Ends the others' waiting. Where even this cannot be written, they end by their time-out."""
        try:
            if not names.told_ranks(self._store.names(folder), "failed"):
                commit.tell_failed(self._store, folder, self._rank, reason)
        except OSError as error:
            log.error("rank %d could not tell that its save failed: %s", self._rank, error)

    def _prune(self, keep: Collection[str], damaged: Collection[str], attempt: int) -> None:
        """A checkpoint that could not be removed harms nothing but the disk: it is told, and tried again next time."""
        try:
            retention.prune_root(self._store, self._policy, keep, damaged, attempt)
        except (OSError, CheckpointError) as error:
            log.warning("old checkpoints could not be removed from %s: %s", self._store.url, error)


def _by_rank(error: Exception, rank: int) -> str:
    """The cause, with the rank that it happened on."""
    text = str(error)
    return f"rank {rank}: {text}" if isinstance(error, OSError) else text
