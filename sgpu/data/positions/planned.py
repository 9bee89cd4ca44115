"""Positions in our own order: the same on every rank, continued by any world size and any number of workers."""

from __future__ import annotations

from typing import Any

from sgpu import runtime
from sgpu.contract.errors import DataError, InputError
from sgpu.data.dataset import VolumeDataset, shared_numbers
from sgpu.data.ordering.draws import parts_of
from sgpu.data.ordering.position import DealtPlan, Plan, plan_of
from sgpu.data.ordering.sizes import Batching, check_sizes
from sgpu.data.ordering.walk import WalkPlan
from sgpu.data.positions.pipeline import VERSION, Inner, check_dataset, check_kind, require_same, workers_ended
from sgpu.data.positions.seeds import saved_seed, seed_of
from sgpu.data.positions.streams import Envelope, Field, PlannedStream
from sgpu.data.source import Source


class Planned:
    """Our own order, cut by the world that there is: the same on every rank, continued by any world size."""

    def __init__(
        self, dataset: Any, batching: Batching, *, volume: VolumeDataset | None, shuffle: bool, seed: int | None
    ) -> None:
        self.dataset, self.volume, self.batching = dataset, volume, batching
        self.samples = len(dataset if volume is None else volume)
        self.shuffle, self.asked, self.seed = shuffle, seed, seed_of(seed)
        self.epoch, self.ended = (0 if volume is None else volume.epoch), False
        self._start, self._cursor = 0, 0
        self._plan: Plan | DealtPlan | None = None
        self._kind = "evaluation" if batching.dealt else "planned"
        self._told = None if volume is None else volume.told
        self._next = 0
        self._block = shared_numbers(len(Field))

    settles = False
    counted_by_torch = False

    def inner(self) -> Inner:
        return Inner(dataset=PlannedStream(
            self.dataset, self.volume, self.batching, self.samples, self.shuffle, self._block, files=self._files()
        ))  # fmt: skip

    def plan(self, cursor: int = 0) -> Plan | DealtPlan:
        whole, world = self.batching.whole, runtime.world_size()
        if whole is not None and whole % (self.batching.step * world):
            raise InputError(
                f"the loader was made to give {self.batching.step} samples to each rank, towards "
                f"global_batch_size={whole}, and there are {world} ranks now; make it after the process group"
            )
        return plan_of(
            samples=self.samples, batch=self.batching.step, world=runtime.world_size(), rank=runtime.rank(),
            cursor=cursor, drop_last=self.batching.drop_last, dealt=self.batching.dealt, whole=self.batching.whole,
        )  # fmt: skip

    def steps(self) -> int:
        return self.plan().steps

    def left(self) -> int | None:
        return self.plan(self._cursor).steps

    def rewind(self) -> None:
        if self.volume is not None and self.volume.told != self._told:  # the user told the data set itself
            self._told = self.volume.told
            self.set_epoch(self._told[1])
        self._cursor, self._plan, self.ended = self._start, None, False

    def begin(self) -> None:
        self._plan = self.plan(self._start)
        if self._plan.steps == 0 and self._start:
            self._go(self.epoch + 1, 0)
            self._plan = self.plan()
        self._next, self.ended = 0, self._plan.steps == 0  # a rank may have no batch to evaluate
        for field, value in (
            (Field.EPOCH, self.epoch), (Field.CURSOR, self._start), (Field.RANK, runtime.rank()),
            (Field.WORLD, self._plan.world), (Field.SEED, self.seed),
        ):  # fmt: skip
            self._block[field] = value
        if self.ended:
            self._go(self.epoch + 1, 0)

    def accept(self, envelope: Envelope) -> bool:
        if self._plan is None or envelope.number != self._next:
            raise DataError(f"batch {envelope.number} came where {self._next} was due; this is a defect of sgpu.data")
        self._cursor = self._plan.cursor_after(self._next)
        self._next += 1
        if self._next == self._plan.steps:
            self._go(self.epoch + 1, 0)
            self.ended = True
        return True

    def _go(self, epoch: int, cursor: int) -> None:
        self.epoch, self._start, self._cursor = epoch, cursor, cursor
        if self.volume is not None:
            self.volume.follow(epoch)

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._go(epoch, 0)

    def state(self) -> dict[str, Any]:
        return {
            "version": VERSION, "kind": self._kind, "global": not self.batching.dealt, "epoch": self.epoch,
            "cursor": self._cursor, "rank": runtime.rank() if self.batching.dealt else None,
            "samples": self.samples, "seed": self.seed, "shuffle": self.shuffle, "batch_size": self.batching.step,
            "dataset": type(self.dataset).__name__, "global_batch_size": self.batching.whole,
            "world_size": runtime.world_size(),
            "listing": None if self.volume is None else self.volume.source.listing_state(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        rank = ("rank",) if self.batching.dealt else ()
        check_kind(
            state,
            self._kind,
            (*rank, "epoch", "cursor", "samples", "seed", "shuffle", "batch_size", "world_size", "listing"),
            counts=("epoch", "cursor", "samples", "batch_size", "world_size"),
        )
        if self.volume is not None:
            self.volume.source.check_listing(state)
        found = {"samples": self.samples, "shuffle": self.shuffle}
        if self.batching.dealt:
            found |= {"world_size": runtime.world_size(), "rank": runtime.rank(), "batch_size": self.batching.step}
        require_same(state, found, "Make the data set and loader as they were")
        if not self.batching.dealt:
            check_sizes(state, self.batching, world=runtime.world_size())
        check_dataset(state, self.dataset)
        seed = saved_seed(state, self.asked)
        ended = state["cursor"] > 0 and self.plan(state["cursor"]).steps == 0  # this world drops what is left, if any
        self.seed = seed
        self._go(state["epoch"] + ended, 0 if ended else state["cursor"])
        self.ended = False

    def ran_out(self) -> None:
        raise workers_ended()

    def at(self) -> tuple[int, int]:
        return self.epoch, self._cursor

    def _files(self) -> Source | None:
        """The volume whose files are the samples, by the same numbers."""
        if self.volume is not None:
            return self.volume.source if len(self.volume.source) == self.samples else None
        # as many files as samples: most likely one each, and a wrong guess costs no more than reading ahead
        inside = [part for part in parts_of(self.dataset) if isinstance(part, Source)]
        return inside[0] if len(inside) == 1 and len(inside[0]) == self.samples else None

    def future(self) -> tuple[Source, WalkPlan] | None:
        source = self._files()
        if source is None:
            return None
        return source, WalkPlan(
            samples=self.samples, batch=self.batching.step, world=runtime.world_size(), rank=runtime.rank(),
            seed=self.seed, shuffle=self.shuffle, drop_last=self.batching.drop_last, dealt=self.batching.dealt,
            whole=self.batching.whole,
        )  # fmt: skip
