"""What runs inside a loader's worker: it makes finished batches, and says with each which one it is."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from sgpu.contract.errors import DataError, SgpuError
from sgpu.data.dataset import VolumeDataset
from sgpu.data.fetching.first import FirstFiles
from sgpu.data.measuring.work import Stopwatch, Work
from sgpu.data.ordering.draws import Draws
from sgpu.data.ordering.generators import preserved
from sgpu.data.ordering.order import mix, mixed_all, order
from sgpu.data.ordering.position import DealtPlan, Plan, plan_of
from sgpu.data.ordering.sizes import Batching
from sgpu.data.positions.telling import note_file, note_sample
from sgpu.data.source import Source
from sgpu.data.volumes.opening import hasten

END = object()
_PLANNED_AHEAD = 4096  # samples whose place in the order is worked out in one go


class Kind(IntEnum):
    BATCH = 0
    NOTHING = 1  # keeps the turn of a worker whose batch was handed out before
    END = 2  # this worker has no more batches in this epoch
    ERROR = 3


class Envelope(NamedTuple):
    """A batch on its way from a worker.

    Attributes:
        number: of the batch, in its epoch's rest (planned) or in its worker's stream.
        samples: in the batch.
        data: what the loop gets, or an SgpuError.
        snapshot: a pickled state of the user's data set after the batch.
        last: of the epoch, where the sampler is the user's.
        work: what it cost the worker.
    """

    kind: int
    number: int
    worker: int
    samples: int = 0
    data: Any = None
    snapshot: bytes | None = None
    last: bool = False
    work: Work = Work()


class Field(IntEnum):
    """Places in the numbers that the main process shares with its workers; read when an iteration begins."""

    EPOCH = 0
    CURSOR = 1
    RANK = 2
    WORLD = 3
    SEED = 4
    RESUMING = 5


def itself(value: Any) -> Any:
    return value


def first(values: Sequence[Any]) -> Any:
    return values[0]


def whose() -> tuple[int, int]:
    """Number of this worker, and of workers; the main process is the only one of one."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)


def undisturbed() -> contextlib.AbstractContextManager[None]:
    """The main process' generators are not ours to move; a worker's are. Can be entered again and again."""
    return preserved() if get_worker_info() is None else contextlib.nullcontext()


def fetch_items(dataset: Any, numbers: Sequence[Any], seeds: Sequence[int], draws: Draws) -> list[Any]:
    """Samples of a map-style data set, each with its own draws (its batch's, where the set fetches whole batches)."""
    if callable(getattr(dataset, "__getitems__", None)) and not isinstance(dataset, Subset):
        draws.begin(seeds[0])
        return list(dataset.__getitems__(list(numbers)))
    items, begin = [], draws.begin
    for number, seed in zip(numbers, seeds, strict=True):
        begin(seed)
        try:
            items.append(dataset[number])
        except Exception as problem:
            note_sample(problem, dataset, number)
            raise
    return items


class Batch(NamedTuple):
    """A batch to be made: its number in the plan, the samples, and what the draws of each begin from."""

    step: int
    numbers: list[int]
    seeds: list[int]


def planned(
    plan: Plan | DealtPlan, steps: range, *, rank: int, samples: int, seed: int, epoch: int, shuffle: bool
) -> Iterator[Batch]:
    """Some steps' batches of a rank. Ever more are worked out at once, since NumPy costs by the call."""
    stem, at, several = mix(seed, epoch), 0, 1
    while at < len(steps):
        some = steps[at : at + several]
        at += several
        spans = [plan.part(step, rank) for step in some]
        positions = np.concatenate([np.arange(*span, dtype=np.int64) for span in spans])
        numbers = order(positions, samples=samples, seed=seed, epoch=epoch, shuffle=shuffle).tolist()
        seeds = mixed_all(stem, positions)
        begin = 0
        for step, (first, last) in zip(some, spans, strict=True):
            end = begin + last - first
            yield Batch(step, numbers[begin:end], seeds[begin:end])
            begin = end
        several = max(1, min(2 * several, _PLANNED_AHEAD // max(1, spans[0][1] - spans[0][0])))


class PlannedStream(IterableDataset[Envelope]):
    """Batches of our own order; worker w of W makes batches w, w + W, ... so that what was handed out is a prefix."""

    def __init__(
        self,
        dataset: Any,
        volume: VolumeDataset | None,
        batching: Batching,
        samples: int,
        shuffle: bool,
        block: torch.Tensor,
        *,
        files: Source | None = None,
    ) -> None:
        self.dataset, self.volume, self.batching = dataset, volume, batching
        self.samples, self.shuffle, self.block, self.files = samples, shuffle, block, files

    def __iter__(self) -> Iterator[Envelope]:
        """Files are on their way at once, though torch asks for the first batch only when all workers are there."""
        told = [int(value) for value in self.block.tolist()]
        plan = plan_of(
            samples=self.samples, batch=self.batching.step, world=told[Field.WORLD], rank=told[Field.RANK],
            cursor=told[Field.CURSOR], drop_last=self.batching.drop_last, dealt=self.batching.dealt,
            whole=self.batching.whole,
        )  # fmt: skip
        worker, workers = whose()
        batches = partial(
            planned, plan, range(worker, plan.steps, workers), rank=told[Field.RANK], samples=self.samples,
            seed=told[Field.SEED], epoch=told[Field.EPOCH], shuffle=self.shuffle,
        )  # fmt: skip
        envelopes = self._envelopes(batches(), worker, told[Field.EPOCH])
        if self.files is not None:
            if get_worker_info() is not None:
                hasten(self.files.volume)
            # the first batch is worker 0's; where files are large, those of others would only compete with it
            first = FirstFiles(
                self.files, (number for batch in batches() for number in batch.numbers),
                at_least=0 if worker else self.batching.step, readers=workers,
            )  # fmt: skip
            weakref.finalize(envelopes, first.stop)
        return envelopes

    def _envelopes(self, batches: Iterator[Batch], worker: int, epoch: int) -> Iterator[Envelope]:
        tell_epoch(self.dataset, epoch)
        draws = Draws(self.dataset)
        guard = undisturbed()
        for batch in batches:
            with guard:
                envelope = self._make(batch, draws, worker, epoch)
            yield envelope
            if envelope.kind == Kind.ERROR:
                return

    def _make(self, batch: Batch, draws: Draws, worker: int, epoch: int) -> Envelope:
        watch = Stopwatch()
        try:
            if self.volume is None:
                items = fetch_items(self.dataset, batch.numbers, batch.seeds, draws)
            else:
                items = self._of_files(self.volume, batch, draws, epoch)
            watch.samples_made()
            data = self.batching.finish(items)
            return Envelope(Kind.BATCH, batch.step, worker, len(items), data, work=watch.work())
        except SgpuError as problem:  # torch would rebuild it from its text alone and lose its facts
            return Envelope(Kind.ERROR, batch.step, worker, data=problem)

    def _of_files(self, volume: VolumeDataset, batch: Batch, draws: Draws, epoch: int) -> list[Any]:
        """Lets the user's data set go over just these files, and sees that each file became one sample."""
        items: list[Any] = []
        numbers = batch.numbers
        run = volume.begin_run(numbers, epoch)
        try:
            iterator = iter(self.dataset)
            for seed in batch.seeds:
                draws.begin(seed)
                item = next(iterator, END)
                if item is END:
                    raise _not_one_to_one(self.dataset, len(numbers), f"{len(items)} samples")
                items.append(item)
            if next(iterator, END) is not END:
                raise _not_one_to_one(self.dataset, len(numbers), f"more than {len(items)} samples")
            if run.handed != len(numbers):
                raise _not_one_to_one(
                    self.dataset, len(numbers), f"{len(items)} samples, having read {run.handed} files,"
                )
        except Exception as problem:
            if run.handed:
                note_file(problem, volume, numbers[run.handed - 1])
            raise
        finally:
            volume.end_run()
        return items


class SampledItems(Dataset[Envelope]):
    """Batches that the user's own sampler chose, each told by a token."""

    def __init__(self, dataset: Any, batching: Batching) -> None:
        self.dataset, self.batching = dataset, batching
        self._draws: Draws | None = None

    def __getitem__(self, token: Token) -> Envelope:
        if self._draws is None:
            self._draws = Draws(self.dataset)
        watch = Stopwatch()
        with undisturbed():
            try:
                places = np.arange(token.serial, token.serial + len(token.indices), dtype=np.int64)
                items = fetch_items(self.dataset, token.indices, mixed_all(token.stem, places), self._draws)
                watch.samples_made()
                data = self.batching.finish(items)
                return Envelope(
                    Kind.BATCH, token.number, whose()[0], len(items), data, last=token.last, work=watch.work()
                )
            except SgpuError as problem:
                return Envelope(Kind.ERROR, token.number, whose()[0], data=problem)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_draws": None}


class Token(NamedTuple):
    """A batch of the user's sampler: its number, what the draws begin from with the first sample's place, samples."""

    number: int
    stem: int
    serial: int
    indices: list[Any]
    last: bool


def tell_epoch(dataset: Any, epoch: int) -> None:
    """Calls the user's own `set_epoch`; here it reaches workers that live on."""
    tell = getattr(dataset, "set_epoch", None)
    if callable(tell) and not isinstance(dataset, VolumeDataset):
        tell(epoch)


def _not_one_to_one(dataset: object, files: int, samples: str) -> DataError:
    name = type(dataset).__name__
    return DataError(
        f"{name}.__iter__ gave {samples} for {files} files; an exact position needs one sample a file. Yield one "
        "sample for each path (a substitute for a broken file), or pass DataLoader(..., files_at_a_time=1), where each "
        "file makes its samples by itself, or one_to_one=False, which resumes by reading again what was read, with the "
        "same world size and workers only.",
        dataset=name,
    )
