"""Positions in data sets that make any number of samples of a file: files that are done, and samples inside the next.

The data set is iterated anew over each block of `files_at_a_time` files, so that a sample depends on the files of its
block alone: resuming reads at most one block a worker again, and any other world goes on with what all ranks left.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from sgpu import runtime
from sgpu.contract.errors import DataError, SgpuError
from sgpu.data.dataset import Run, VolumeDataset
from sgpu.data.measuring.work import Stopwatch
from sgpu.data.ordering.draws import Draws
from sgpu.data.ordering.order import mix, mixed, order
from sgpu.data.ordering.rest import Rest, dealt
from sgpu.data.ordering.sizes import Batching
from sgpu.data.positions.free import Free
from sgpu.data.positions.free_stream import FreeStream, StreamResume
from sgpu.data.positions.pipeline import VERSION, Inner, check_dataset, check_kind, require_same
from sgpu.data.positions.streams import END, Envelope, Field, Kind, tell_epoch, undisturbed, whose
from sgpu.data.positions.telling import note_file

_ENTRIES = (
    "epoch", "head", "start", "stride", "places", "ended", "next_worker", "seed", "shuffle", "files", "files_at_a_time",
    "batch_size", "drop_last", "workers", "rank", "world_size", "listing",
)  # fmt: skip


class Blocks(Free):
    """Turns go round the workers as in any stream that nobody can count; the position is of files and samples."""

    def __init__(
        self, dataset: Any, batching: Batching, *, volume: VolumeDataset, files_at_a_time: int, workers: int,
        workers_live_on: bool, seed: int,
    ) -> None:  # fmt: skip
        super().__init__(
            dataset, batching, volumes=[volume], with_state=False, workers=workers, workers_live_on=workers_live_on,
            seed=seed,
        )  # fmt: skip
        self.volume, self.size = volume, files_at_a_time
        self.blocks = -(-len(volume) // files_at_a_time)
        self._rest = self._fresh()

    @property
    def kind(self) -> str:
        return "blocks"

    def _fresh(self) -> Rest:
        return Rest(start=runtime.rank(), stride=runtime.world_size(), blocks=self.blocks)

    def inner(self) -> Inner:
        stream = BlockStream(self.dataset, self.volume, self.batching, self.size, self.seed, self._block)
        stream.resume, stream.rest = (self._origin, self._rest) if self._resuming else (None, None)
        return Inner(dataset=stream)

    def _go(self, epoch: int) -> None:
        super()._go(epoch)
        self._origin = self._now = StreamResume.fresh(max(1, self.workers))
        self._rest = self._fresh()

    def state(self) -> dict[str, Any]:
        now = self._now
        return {
            "version": VERSION, "kind": self.kind, "dataset": type(self.dataset).__name__, "global": False,
            "merges": True, "epoch": self.epoch,
            "head": [list(item) for item in self._rest.head], "start": self._rest.start, "stride": self._rest.stride,
            "places": [list(place) if place else [0, 0] for place in now.snapshots], "ended": list(now.ended),
            "next_worker": now.next_worker, "seed": self.seed, "shuffle": self.volume.shuffle,
            "files": len(self.volume), "files_at_a_time": self.size, "batch_size": self.batching.size,
            "drop_last": self.batching.drop_last, "workers": self.workers, "rank": runtime.rank(),
            "world_size": runtime.world_size(), "listing": self.volume.source.listing_state(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        self._check(state)
        require_same(
            state, {"world_size": runtime.world_size(), "rank": runtime.rank()},
            "Give the states of all its ranks to load_states, which continues with any",
        )  # fmt: skip
        if state["batch_size"] != self.batching.size:
            warnings.warn(
                f"the position was saved with batch_size {state['batch_size']} and goes on with {self.batching.size}: "
                "no sample is lost or repeated, but batches are others",
                stacklevel=3,
            )
        self._begin_from(state)
        if state["workers"] == self.workers:
            self._rest = self._rest_of(state)
            self._origin = self._now = StreamResume(
                delivered=(0,) * max(1, self.workers), ended=tuple(state["ended"]), next_worker=state["next_worker"],
                snapshots=tuple(tuple(place) for place in state["places"]),
            )  # fmt: skip
        else:
            self._rest = self._left_of(state)

    def load_all(self, states: Sequence[dict[str, Any]]) -> None:
        """Continues with what all ranks of another world left."""
        for state in states:
            self._check(state)
        known = {(state["rank"], state["world_size"], state["epoch"]) for state in states}
        wanted = {(rank, len(states), states[0]["epoch"]) for rank in range(len(states))}
        if known != wanted:
            raise DataError(
                f"expected one state of each rank of one world, all in one epoch; found (rank, world size, epoch) "
                f"{sorted(known)}"
            )
        self._begin_from(states[0])
        self._rest = dealt(
            [self._left_of(state) for state in states], rank=runtime.rank(), world=runtime.world_size()
        )  # fmt: skip

    def _check(self, state: dict[str, Any]) -> None:
        check_kind(state, self.kind, _ENTRIES, counts=("epoch", "start", "stride", "next_worker", "workers"))
        check_dataset(state, self.dataset)
        self.volume.source.check_listing(state)
        found = {
            "files": len(self.volume), "shuffle": self.volume.shuffle, "seed": self.seed, "files_at_a_time": self.size,
            "drop_last": self.batching.drop_last,
        }  # fmt: skip
        require_same(state, found, "Make the data set and loader as they were")

    def _begin_from(self, state: dict[str, Any]) -> None:
        self._go(state["epoch"])
        self.ended, self._resuming = False, True

    def _rest_of(self, state: dict[str, Any]) -> Rest:
        head = tuple((block, done) for block, done in state["head"])
        return Rest(head=head, start=state["start"], stride=state["stride"], blocks=self.blocks)

    def _left_of(self, state: dict[str, Any]) -> Rest:
        ended = zip(state["places"], state["ended"], strict=True)
        return self._rest_of(state).after([None if over else (place[0], place[1]) for place, over in ended])


class BlockStream(FreeStream):
    """Batches of one worker: every so-many-th block of its rank's sequence."""

    def __init__(
        self, dataset: Any, volume: VolumeDataset, batching: Batching, size: int, seed: int, block: torch.Tensor
    ) -> None:
        super().__init__(dataset, [volume], batching, False, block)
        self.volume, self.size, self.seed = volume, size, seed
        self.rest: Rest | None = None

    def __iter__(self) -> Iterator[Envelope]:
        told = [int(value) for value in self.block.tolist()]
        worker, workers = whose()
        resume = self.resume if told[Field.RESUMING] else None
        if resume is not None and worker < resume.next_worker:
            yield Envelope(Kind.NOTHING, -1, worker)
        blocks = -(-len(self.volume) // self.size)
        rest = self.rest if resume is not None else None
        rest = rest or Rest(start=told[Field.RANK], stride=told[Field.WORLD], blocks=blocks)
        place = (resume.snapshots[worker] if resume is not None else None) or (0, 0)
        final = Envelope(Kind.END, -1, worker, snapshot=pickle.dumps(place))
        if resume is None or not resume.ended[worker]:
            tell_epoch(self.dataset, told[Field.EPOCH])
            samples = self._samples(told, rest, place, worker, workers)
            while (envelope := self._next(samples, worker)).kind == Kind.BATCH:
                yield envelope
            final = envelope
        while True:
            yield final

    def _next(self, samples: Iterator[tuple[tuple[int, int], Any]], worker: int) -> Envelope:
        watch, items = Stopwatch(), list[Any]()
        place = (0, 0)
        try:
            with undisturbed():
                while len(items) < self.batching.step and (found := next(samples, None)) is not None:
                    place = found[0]
                    items.append(found[1])
                if not items or (self.batching.drop_last and len(items) < self.batching.step):
                    return Envelope(Kind.END, -1, worker, snapshot=pickle.dumps(place))
                watch.samples_made()
                data = self.batching.finish(items)
                told = pickle.dumps(place)
                return Envelope(Kind.BATCH, 0, worker, len(items), data, told, work=watch.work())
        except SgpuError as problem:
            return Envelope(Kind.ERROR, 0, worker, data=problem)

    def _samples(
        self, told: list[int], rest: Rest, place: tuple[int, int], worker: int, workers: int
    ) -> Iterator[tuple[tuple[int, int], Any]]:
        """Each sample, with its place: which of this worker's items it is of, and how many samples of that are done."""
        draws = Draws(self.dataset)
        for turn in range(place[0], len(range(worker, rest.items, workers))):
            block, done = rest.item(worker + turn * workers)
            done = max(done, place[1]) if turn == place[0] else done
            numbers = self._files(block, told[Field.EPOCH])
            self._foresee(rest, turn, place[0], worker, workers, told[Field.EPOCH])
            run, iterator, made = Run(numbers, told[Field.EPOCH]), None, 0
            stem = mix(told[Field.SEED], told[Field.EPOCH], block)
            while True:
                draws.begin(mixed(stem, made))
                self.volume.continue_run(run)
                try:
                    iterator = iter(self.dataset) if iterator is None else iterator
                    item = next(iterator, END)
                except Exception as problem:
                    if run.handed:
                        note_file(problem, self.volume, numbers[run.handed - 1])
                    raise
                finally:
                    self.volume.end_run()  # others may read this volume before the next sample
                if item is END:
                    break
                made += 1
                if made > done:
                    yield (turn, made), item
            if run.handed != len(numbers):
                raise DataError(
                    f"{type(self.dataset).__name__}.__iter__ ended having read {run.handed} of {len(numbers)} files; "
                    "with files_at_a_time it must go over all paths that it is given"
                )

    def _foresee(self, rest: Rest, turn: int, first: int, worker: int, workers: int, epoch: int) -> None:
        """Files of the blocks after this one come while it is read."""
        for later in (1, 2) if turn == first else (2,):
            item = worker + (turn + later) * workers
            if item < rest.items:
                for number in self._files(rest.item(item)[0], epoch):
                    self.volume.source.soon(self.volume.file_of(number))

    def _files(self, block: int, epoch: int) -> list[int]:
        positions = np.arange(block * self.size, min((block + 1) * self.size, len(self.volume)), dtype=np.int64)
        numbers = order(
            positions, samples=len(self.volume), seed=self.seed, epoch=epoch, shuffle=self.volume.shuffle
        )  # fmt: skip
        found: list[int] = numbers.tolist()
        return found
