"""The torch loader underneath ours, from pass to pass: begun anew where the position has moved, with its fetcher."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import IterableDataset

from sgpu import runtime
from sgpu.data.fetching.ahead import Follower
from sgpu.data.ordering.order import mix
from sgpu.data.positions.pipeline import Pipeline
from sgpu.data.positions.streams import Envelope, Kind, first, itself
from sgpu.data.processes.forking import handlers_held_at_forks, objects_frozen
from sgpu.data.volumes.opening import before_forks
from sgpu.data.workers.passing import Pass, WorkerInit
from sgpu.data.workers.queues import with_direct_queues
from sgpu.data.workers.slots import slots_for
from sgpu.data.workers.transport import Sealing

TorchLoader = torch.utils.data.DataLoader


@dataclass(frozen=True, kw_only=True)
class Workers:
    """What torch's loader is told beside its data, as it names it. `persistent_workers`: they stay between passes."""

    num_workers: int
    persistent_workers: bool
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Any
    prefetch_factor: int | None
    pin_memory: bool
    pin_memory_device: str
    timeout: float


class Running:
    """Order of calls: `next` for each batch of a pass until it gives None; then the next pass, and so on."""

    def __init__(self, pipeline: Pipeline, workers: Workers) -> None:
        self._pipeline, self._workers = pipeline, workers
        self._inner: Iterable[Envelope] | None = None
        self._sealing = Sealing(itself)
        self._current: Pass | None = None
        self._version = 0
        self._follower = Follower()

    def next(self) -> Envelope | None:
        """The next batch of the present pass, which begins with its first; None: the epoch has ended."""
        current = self._current
        if current is None and self._pipeline.ended:
            return None
        if current is None or current.version != self._version:
            current = self._begin()
        while not self._pipeline.ended:
            envelope = current.next()
            if envelope is None:
                self._pipeline.ran_out()
            elif envelope.kind == Kind.ERROR:
                problem, envelope = envelope.data, None
                try:
                    raise problem
                finally:
                    del problem  # else it holds this frame and this frame holds it, and with it the workers
            elif self._pipeline.accept(envelope):
                return envelope
        current.finish(drain=not self._pipeline.settles)
        self._current = None
        return None

    def handed(self) -> None:
        """The loop has the batch: the fetcher need not keep what is before it."""
        self._follower.tell(self._pipeline.at())

    def settle(self) -> None:
        """Looks whether another batch comes: only then is it known that an epoch has not ended."""
        current = self._current
        if not self._pipeline.settles or current is None or current.version != self._version:
            return
        while not self._pipeline.ended:
            envelope = current.next()
            if envelope is None or envelope.kind in (Kind.BATCH, Kind.ERROR):
                current.pending = envelope
                return
            self._pipeline.accept(envelope)

    def moved(self, *, anew: bool) -> None:
        """The pipeline's position was set: the present pass goes on there, with workers made `anew` or not."""
        self._version += 1
        if anew:
            self._drop()

    def end_pass(self) -> None:
        if self._current is not None:
            self._current.close()
        self._current = None

    def close(self) -> None:
        """Ends workers and fetcher; `next` starts others."""
        self._drop()
        self._follower.close()

    def _drop(self) -> None:
        self.end_pass()
        self._inner = None

    def _begin(self) -> Pass:
        told, workers_start = self._workers, self._inner is None or not self._workers.persistent_workers
        if self._inner is None:
            self._inner = self._make()
        if told.num_workers and workers_start:  # earlier workers may still write to their slots
            self._sealing.slots = slots_for(told.num_workers, told.prefetch_factor or 1)
        self._pipeline.begin()
        future = self._pipeline.future()
        if future is not None:
            self._follower.begin(*future, self._pipeline.at())
            if told.num_workers:
                before_forks(future[0].volume)
        with handlers_held_at_forks(), objects_frozen():
            source = iter(self._inner)
        self._current = Pass(source, self._version, remote=told.num_workers > 0)
        return self._current

    def _make(self) -> Iterable[Envelope]:
        inner, told = self._pipeline.inner(), self._workers
        if isinstance(inner.dataset, IterableDataset) and not told.num_workers and not told.pin_memory:
            return inner.dataset  # torch's loader around it would add a fifth of what a small batch costs
        self._sealing = Sealing(itself if inner.tokens is None else first)
        with warnings.catch_warnings():  # the user's loader told it once
            warnings.filterwarnings("ignore", message="This DataLoader will create .* worker processes")
            return TorchLoader(
                inner.dataset,
                batch_size=None if inner.tokens is None else 1,
                batch_sampler=None if inner.tokens is None else inner.tokens,
                collate_fn=self._sealing,
                num_workers=told.num_workers, pin_memory=told.pin_memory, timeout=told.timeout,
                worker_init_fn=WorkerInit(told.worker_init_fn, self._sealing) if told.num_workers else None,
                multiprocessing_context=with_direct_queues(told.multiprocessing_context) if told.num_workers else None,
                prefetch_factor=told.prefetch_factor,
                persistent_workers=told.persistent_workers, pin_memory_device=told.pin_memory_device,
                generator=torch.Generator().manual_seed(mix(self._pipeline.epoch, runtime.rank()) >> 1),
            )  # fmt: skip
