"""Makes a checkpoint of what is staged: write, tell the others, commit, prune. Without torch.

Runs in the helper process, or in a thread of the trainer for stores that only that process has.
"""

from __future__ import annotations

import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from sgpu import settings
from sgpu.checkpoint.keeping import retention
from sgpu.checkpoint.stores import trouble
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing import commit, ownership
from sgpu.checkpoint.writing.commit import Patience
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.checkpoint.writing.told import tell_done
from sgpu.checkpoint.writing.write import WrittenFile, write_share
from sgpu.contract.errors import CheckpointError, CheckpointSaveError
from sgpu.contract.events import emit
from sgpu.contract.failpoint import failpoint
from sgpu.contract.rundir import RunDir

log = logging.getLogger("sgpu.checkpoint")
_told: set[str] = set()


def finish(
    store: Store,
    memory: memoryview,
    job: SaveJob,
    patience: Patience,
    on_written: Callable[[list[WrittenFile]], None] = lambda written: None,
) -> float:
    """Gives the (monotonic) time at which the checkpoint existed; `on_written` is told before others are waited for.

    Raises:
        CheckpointSaveError: there is no checkpoint; the other ranks have been told.
    """
    reason, facts = "its writing failed", dict[str, Any]()
    try:
        _write_and_commit(store, memory, job, patience, on_written)
        reason = ""
    except (OSError, CheckpointError) as error:
        failure = failed(store, job, error)
        reason, facts = trouble.cause(failure)
        raise failure from error
    finally:
        if reason:
            try_to_tell(store, job.folder, job.rank, reason, facts)
    finished = time.monotonic()
    if job.rank == 0:
        _prune(store, job)
    return finished


def _write_and_commit(
    store: Store,
    memory: memoryview,
    job: SaveJob,
    patience: Patience,
    on_written: Callable[[list[WrittenFile]], None],
) -> None:
    failpoint("checkpoint.write", job.rank, step=job.step)
    written = write_share(store, memory, job.folder, job.rank, job.files)
    on_written(written)
    failpoint("checkpoint.shard_written", job.rank, step=job.step, file=_first_file(store, job))
    tell_done(store, job, written)
    failpoint("checkpoint.done", job.rank, step=job.step)
    if job.rank == 0:
        commit.commit(store, job, patience)
    else:
        commit.wait_for_commit(store, job, patience)


def _first_file(store: Store, job: SaveJob) -> pathlib.Path | None:
    """Where the first of this rank's files lies, on a volume that is a folder."""
    root = store.local_root
    return root / job.folder / job.files[0].name if root is not None and job.files else None


def failed(store: Store, job: SaveJob, error: Exception) -> CheckpointSaveError:
    """The cause, with the rank that it happened on."""
    return trouble.not_saved(
        error, store, folder=job.folder, step=job.step, rank=job.rank, needed_bytes=job.size_bytes
    )  # fmt: skip


def try_to_tell(
    store: Store, folder: str, rank: int, reason: str, facts: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Where even this cannot be written, the other ranks end by their time-out."""
    try:
        commit.tell_failed(store, folder, rank, reason, facts)
    except OSError as error:
        log.error("rank %d could not tell that its save failed: %s", rank, error)


def _prune(store: Store, job: SaveJob) -> None:
    """A checkpoint that could not be removed harms nothing but the disk: it is told, and tried again next time."""
    try:
        ownership.note_seen(store, job.attempt)
        retention.prune_root(store, job.policy, {job.folder, *job.keep}, job.damaged, job.attempt)
    except (OSError, CheckpointError) as error:
        message = f"old checkpoints could not be removed from {store.url}: {error}"
        log.warning("%s", message)
        root = settings.run_dir()
        if root is not None and message not in _told:  # the same at each save is told once
            _told.add(message)
            emit(RunDir(root), "warning", generation=job.generation, message=message)
