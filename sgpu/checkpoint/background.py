"""The part of a save that the training does not wait for: copy, hand over, and wait for what became of it."""

from __future__ import annotations

import functools
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from sgpu.checkpoint.helper.finish import failed, try_to_tell
from sgpu.checkpoint.helper.writers import LeftError, Writer
from sgpu.checkpoint.live.stage import Staged
from sgpu.checkpoint.stores import trouble
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.contract.errors import CheckpointError, CheckpointSaveError
from sgpu.contract.failpoint import failpoint


@dataclass(kw_only=True)
class Flight:
    """The save that is under way.

    Attributes:
        staged: set when the live tensors may change.
        handed: set when the writer has all that it needs, or nothing is to be handed over any more.
        work: gives when it was done.
    """

    step: int
    folder: str
    started: float
    size_bytes: int
    blocked_seconds: float = 0.0
    staged: threading.Event = field(default_factory=threading.Event)
    handed: threading.Event = field(default_factory=threading.Event)
    work: Future[float] = field(default_factory=Future)

    def run(self, action: Callable[[], float]) -> None:
        """How it ended, whatever that was, is told through the future."""
        try:
            self.work.set_result(action())
        except BaseException as error:  # noqa: BLE001
            self.work.set_exception(error)
        finally:
            self.staged.set()
            self.handed.set()


class Background:
    """One thread for all saves: starting one each time would hold up the training until it runs."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon, so that a rank whose peers are gone can end; `Checkpointer.leave` waits for it.
        threading.Thread(target=_work, args=(self._tasks,), daemon=True, name="sgpu-checkpoint").start()
        weakref.finalize(self, self._tasks.put, None)

    def start(self, flight: Flight, action: Callable[[], float]) -> None:
        self._tasks.put(functools.partial(flight.run, action))

    def close(self) -> None:
        """After what is under way."""
        self._tasks.put(None)


def _work(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # holds tensors, which are not to be held until the next one comes


def call_before_steps(method: Callable[[], None]) -> Any:
    """Has every optimizer of this process call it before it changes anything, until its object is gone; `remove()`
    ends that.
    """
    reference = weakref.WeakMethod(method)

    def call(*_arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            alive()

    return register_optimizer_step_pre_hook(call)


def finish_in_background(
    store: Store, writer: Writer, staged: Staged, job: SaveJob, flight: Flight, mark: int
) -> float:
    """Gives the (monotonic) time at which the checkpoint existed.

    Args:
        store: where the other ranks look.
        writer: finishes what is staged.
        staged: this rank's share.
        job: without what is told by `staged.complete`.
        flight: is told how far it is.
        mark: that the segment gets when it holds all.

    Raises:
        CheckpointSaveError: there is no checkpoint; the other ranks have been told.
    """
    reason, facts = "its background thread failed", dict[str, Any]()
    try:
        staged.copy()
        flight.staged.set()
        filled = staged.complete(mark)
        failpoint("checkpoint.staged", job.rank, step=job.step)
        flight.size_bytes = staged.size_bytes + sum(size for _, size in filled.own_objects) + filled.rank_bytes
        whole = replace(
            job, objects=filled.objects, own_objects=filled.own_objects, rank_bytes=filled.rank_bytes,
            blocked_seconds=flight.blocked_seconds, echoes=staged.echoes,
        )  # fmt: skip

        def handed() -> None:
            flight.handed.set()
            failpoint("checkpoint.handed", job.rank, step=job.step)

        finished = writer.save(whole, mark, handed)
        reason = ""
        return finished
    except LeftError:
        reason = ""
        raise
    except (OSError, CheckpointError) as error:
        if isinstance(error, CheckpointSaveError) and "step" in error.facts:
            reason, facts = trouble.cause(error)
            raise  # the writer's own word
        failure = failed(store, job, error)
        reason, facts = trouble.cause(failure)
        raise failure from error
    finally:
        if reason:
            try_to_tell(store, job.folder, job.rank, reason, facts)
