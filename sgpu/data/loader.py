"""A DataLoader that knows its position exactly. Drop-in for torch's, which does the work underneath."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.utils.data

from sgpu import runtime
from sgpu.contract.errors import DataError, InputError
from sgpu.data import together
from sgpu.data.arguments import check_arguments, check_in_order, whole_workers
from sgpu.data.caching.private import private_root
from sgpu.data.measuring.counters import CacheCounts
from sgpu.data.measuring.report import LoaderReport
from sgpu.data.measuring.stats import LoaderStats, Meter
from sgpu.data.ordering.draws import parts_of
from sgpu.data.ordering.sizes import ONE_BY_DEFAULT, Batching, sizes_of
from sgpu.data.positions.blocks import Blocks
from sgpu.data.positions.choose import Asked, check_dataset, choose_pipeline
from sgpu.data.positions.pipeline import Pipeline
from sgpu.data.processes import living
from sgpu.data.source import Source
from sgpu.data.workers.passing import Epoch, default_workers
from sgpu.data.workers.running import Running, Workers

T = TypeVar("T")


class DataLoader(torch.utils.data.DataLoader[T]):
    """torch's DataLoader with an exact position.

    Takes all of torch's arguments. What differs:

    - `num_workers=None` chooses a few for the CPUs of this rank.
    - A map-style data set without a sampler, and a `VolumeDataset`, are split over the ranks by themselves, in an order
      that `seed` and the epoch fix. All ranks take equally many steps; no sample is repeated, none left out but by
      drop_last.
    - Each `iter` is one epoch: it begins where `load_state_dict` said, or at the start of the present epoch, which
      moves on when an epoch ends.
    - Workers live on between epochs unless `persistent_workers=False`.
    - Each sample is made with random draws of its own, and this process' generators are not touched.

    Args:
        global_batch_size: samples of all ranks together: the same global batches for any world size that divides it.
            Each rank takes its part at once, or in `loader.accumulate` equal batches where `batch_size` allows no more
            at a time; `TrainLoop` makes one optimizer step of these.
        seed: of the order; None: the volume's, or the generator's, or the run's, or 0.
        one_to_one: False for an iterable data set around a volume that does not give one sample a file.
        files_at_a_time: for an iterable data set around a volume that gives several samples a file, or none, or one of
            several files. It is iterated anew over each so many files (1: each file by itself), so that a resume reads
            no more than those again, and other world sizes and workers go on.
        evaluation: each rank gets whole batches in turn, so that every sample comes exactly once over all ranks, in
            the same batches for any world size. Ranks may differ by one batch, or have none: no collectives in the
            loop's body. `gather_batches` brings the ranks' results together in order.
        stop_together: where the batches of an iterable data set cannot be counted, all ranks end an epoch when the
            first of them runs out (a small collective at each batch). False if not all ranks iterate this loader.

    Raises:
        InputError: arguments that cannot work. What torch itself refuses it refuses as ever.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = ONE_BY_DEFAULT,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        pin_memory_device: str = "",
        in_order: bool = True,
        global_batch_size: int | None = None,
        seed: int | None = None,
        one_to_one: bool | None = None,
        files_at_a_time: int | None = None,
        evaluation: bool = False,
        stop_together: bool = True,
    ) -> None:
        check_dataset(dataset, shuffle=shuffle)
        check_in_order(in_order)
        check_arguments(
            flags={"shuffle": shuffle, "pin_memory": pin_memory, "persistent_workers": persistent_workers},
            functions={"collate_fn": collate_fn, "worker_init_fn": worker_init_fn},
            samplers={"sampler": sampler, "batch_sampler": batch_sampler},
            generator=generator, prefetch_factor=prefetch_factor, timeout=timeout,
        )  # fmt: skip
        workers = default_workers() if num_workers is None else whole_workers(num_workers)
        sizes = sizes_of(batch_size, global_batch_size, world=runtime.world_size())
        super().__init__(
            dataset, sizes.batch, shuffle, sampler, batch_sampler, workers, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator, prefetch_factor=prefetch_factor,
            persistent_workers=bool(persistent_workers), pin_memory_device=pin_memory_device,
        )  # fmt: skip
        self.global_batch_size, self.accumulate = sizes.whole, sizes.accumulate
        told = Workers(
            num_workers=workers, persistent_workers=workers > 0 and persistent_workers is not False,
            worker_init_fn=worker_init_fn, multiprocessing_context=self.multiprocessing_context,
            prefetch_factor=self.prefetch_factor, pin_memory=pin_memory, pin_memory_device=pin_memory_device,
            timeout=timeout,
        )  # fmt: skip
        self._pipeline: Pipeline = choose_pipeline(dataset, self._batching(sizes.whole, evaluation), Asked(
            sampler=None if sampler is None and batch_sampler is None else self._batches_or_samples(),
            shuffle=bool(shuffle), one_to_one=one_to_one,
            seed=generator.initial_seed() if seed is None and generator is not None else seed,
            files_at_a_time=files_at_a_time, workers=workers, workers_live_on=told.persistent_workers,
        ))  # fmt: skip
        self._running = Running(self._pipeline, told)
        self.stops_together = stop_together and self._pipeline.settles  # an epoch ends for all when it ends for one
        self._meter = Meter(functools.partial(_counts, dataset))  # not a method: a loader that is dropped ends at once
        self._pass, self._under_way = 0, False
        # what is to be told of the samples that the last pass left out; a TrainLoop makes it an event
        self.left_out = ""

    def _batching(self, whole: int | None, evaluation: bool) -> Batching:
        chosen = self.batch_size is None and self.batch_sampler is not None  # torch says None: it has sizes of its own
        return Batching(
            size=1 if chosen else self.batch_size, drop_last=self.drop_last, collate=self.collate_fn, whole=whole,
            dealt=evaluation,
        )  # fmt: skip

    def _batches_or_samples(self) -> Any:
        """What torch made of the user's sampler: batches, or single samples."""
        return self.sampler if self.batch_sampler is None else self.batch_sampler

    # ---- iteration

    def __iter__(self) -> Any:
        self._pass += 1
        self._under_way, self.left_out = False, ""
        self._pipeline.rewind()
        self._running.end_pass()
        return Epoch(self._take, self._pass)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank. TypeError where nobody knows."""
        return super().__len__() if self._pipeline.counted_by_torch else self._pipeline.steps()

    def _take(self, own_pass: int) -> Any:
        """The next batch of the pass that began last."""
        if own_pass != self._pass:
            raise DataError(
                "this loader was iterated anew, which ended the earlier iteration; use one iterator at a time, or a "
                "loader for each"
            )
        # `state_dict` may have found out already that the epoch has ended here, and gone to the next.
        began, epoch = time.perf_counter(), self._pipeline.epoch - self._pipeline.ended
        envelope = self._running.next()
        if self.stops_together and together.is_needed():
            short = together.ranks_without(envelope is not None, epoch)
            if short:
                self._stop_together(together.left_out(short, epoch), epoch, warned=envelope is not None)
                raise StopIteration
        if envelope is None:
            raise StopIteration
        self._running.handed()
        self._meter.add(envelope.samples, time.perf_counter() - began, envelope.work, first=not self._under_way)
        self._under_way = True
        return envelope.data

    def _stop_together(self, told: str, epoch: int, *, warned: bool) -> None:
        """The epoch ends here, since some rank has no batch. `warned`: this one has."""
        self.left_out = told
        if warned:
            warnings.warn(told, stacklevel=4)
            self._pipeline.set_epoch(epoch + 1)
            self._pipeline.ended = True
            self._running.end_pass()

    # ---- position

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were handed out, as plain values.

        "global" tells whether it is the same on every rank and valid for any world size.
        """
        self._running.settle()
        return self._pipeline.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues there: the next batch of the present iteration, or of the next, is the first after that position.

        Raises:
            PositionError: the state is of another kind of loader, or of a topology that it cannot be continued with.
            ListingChangedError: the volume holds other files now.
        """
        self._pipeline.load(state)
        self._running.moved(anew=self._pipeline.settles)

    def batches_left(self) -> int | None:
        """Batches from here to the end of the present epoch on this rank.

        After a position that another world size or batch size had reached, it is not `len(loader)` less those done.
        None where nobody knows better than that.
        """
        return self._pipeline.left()

    def load_states(self, states: Sequence[dict[str, Any]]) -> None:
        """The same from the states of all ranks of another world, where each belongs to its rank but they "merge"."""
        if not isinstance(self._pipeline, Blocks):
            self.load_state_dict(states[0])
            return
        self._pipeline.load_all(states)
        self._running.moved(anew=True)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration; of the present epoch nothing changes, also not what is done of it."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise InputError(f"epoch must be a whole number, 0 or more; found {epoch!r}")
        self._pipeline.set_epoch(epoch)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._pipeline.epoch

    # ---- facts and end

    @property
    def fetch_seconds(self) -> float:
        """What the loop waited for its last batch."""
        return self._meter.last_seconds

    def stats(self) -> LoaderStats:
        """Counts since the loader was made."""
        return self._meter.stats()

    def report(self) -> LoaderReport:
        """Where the loop's time goes: compute, the volume's bandwidth or latency, decoding, collating or transfer.

        Printed, it is one sentence with what to do; of less than 20 batches or 5 seconds: that this is too little.
        """
        return self._meter.report(self.num_workers)

    def close(self) -> None:
        """Ends workers and fetcher. The loader can be iterated again; it starts others then."""
        self._running.close()
        living.sweep(private_root())

    def __enter__(self) -> DataLoader[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _counts(dataset: Any) -> CacheCounts:
    found = CacheCounts()
    for part in parts_of(dataset):
        if isinstance(part, Source):
            found = found.plus(part.counts())
    return found
