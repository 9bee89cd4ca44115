"""Positions in iterable data sets that nobody can count: what each worker's stream gave so far.

Where the data set has `state_dict` and `load_state_dict`, its own states travel with the batches and are loaded again.
Otherwise a resumed stream is read again up to where it was, which is exact but slow.
"""

from __future__ import annotations

import pickle
from typing import Any

from sgpu import runtime
from sgpu.contract.errors import DataError, PositionError
from sgpu.data.dataset import VolumeDataset, shared_numbers
from sgpu.data.ordering.sizes import Batching
from sgpu.data.positions.free_stream import FreeStream, StreamResume
from sgpu.data.positions.pipeline import VERSION, Inner, check_dataset, check_kind, require_same, workers_ended
from sgpu.data.positions.seeds import saved_seed, seed_of
from sgpu.data.positions.streams import Envelope, Field, Kind

_ENTRIES = (
    "epoch", "delivered", "ended", "next_worker", "snapshots", "seed", "batch_size", "drop_last", "workers", "rank",
    "world_size", "listings",
)  # fmt: skip


class Free:
    """One stream a worker; turns go round the workers strictly, those that ended included."""

    settles = True

    def __init__(
        self, dataset: Any, batching: Batching, *,
        volumes: list[VolumeDataset], with_state: bool, workers: int, workers_live_on: bool, seed: int | None,
    ) -> None:  # fmt: skip
        self.dataset, self.batching, self.volumes = dataset, batching, volumes
        self.with_state, self.workers, self.workers_live_on = with_state, workers, workers_live_on
        self.asked, self.seed = seed, seed_of(seed)
        self.epoch, self.ended = 0, False
        self._block = shared_numbers(len(Field))
        self._origin = self._now = StreamResume.fresh(max(1, workers))
        self._resuming = False
        self._told = [volume.told for volume in volumes]
        self._turn = 0
        self.counted_by_torch = not volumes

    @property
    def kind(self) -> str:
        return "states" if self.with_state else "replayed"

    def inner(self) -> Inner:
        stream = FreeStream(self.dataset, self.volumes, self.batching, self.with_state, self._block)
        stream.resume = self._origin if self._resuming else None
        return Inner(dataset=stream)

    def steps(self) -> int:
        raise TypeError(
            f"{type(self.dataset).__name__} does not tell how many batches it gives; iterate the loader to its end"
        )

    def left(self) -> int | None:
        return None

    def rewind(self) -> None:
        told = [volume.told for volume in self.volumes]
        if told != self._told:  # the user told the data set itself
            self._told = told
            self.set_epoch(max(epoch for _, epoch in told))
        self._now, self.ended = self._origin, False

    def begin(self) -> None:
        self._now, self._turn, self.ended = self._origin, 0, False
        for field, value in (
            (Field.EPOCH, self.epoch), (Field.RANK, runtime.rank()), (Field.WORLD, runtime.world_size()),
            (Field.SEED, self.seed), (Field.RESUMING, int(self._resuming)),
        ):  # fmt: skip
            self._block[field] = value

    def accept(self, envelope: Envelope) -> bool:
        if envelope.worker != self._turn:
            raise DataError(
                f"worker {envelope.worker} came in worker {self._turn}'s turn; this is a defect of sgpu.data"
            )
        self._turn = (self._turn + 1) % max(1, self.workers)
        if envelope.kind == Kind.NOTHING:
            return False
        self._now = self._now.after(
            envelope.worker, ended=envelope.kind == Kind.END,
            snapshot=None if envelope.snapshot is None else pickle.loads(envelope.snapshot),
        )  # fmt: skip
        if all(self._now.ended):
            self._go(self.epoch + 1)
            self.ended = True
        return envelope.kind == Kind.BATCH

    def _go(self, epoch: int) -> None:
        """To an epoch's start. What data sets in workers that live on are by then belongs to the position."""
        kept = self._now.snapshots if self.workers_live_on or self.workers == 0 else None
        self._origin = self._now = StreamResume.fresh(max(1, self.workers), kept if self.ended_whole() else None)
        self._resuming, self.epoch = False, epoch
        for volume in self.volumes:
            volume.follow(epoch)

    def ended_whole(self) -> bool:
        return all(self._now.ended)

    def ran_out(self) -> None:
        raise workers_ended()

    def at(self) -> tuple[int, int]:
        return self.epoch, 0

    def future(self) -> None:
        return None

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self._go(epoch)

    def state(self) -> dict[str, Any]:
        now = self._now
        return {
            "version": VERSION, "kind": self.kind, "dataset": type(self.dataset).__name__,
            "global": now.is_start, "epoch": self.epoch,
            "delivered": list(now.delivered), "ended": list(now.ended), "next_worker": now.next_worker,
            "snapshots": list(now.snapshots), "seed": self.seed, "batch_size": self.batching.size,
            "drop_last": self.batching.drop_last, "workers": self.workers, "rank": runtime.rank(),
            "world_size": runtime.world_size(), "listings": [volume.source.listing_state() for volume in self.volumes],
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        check_kind(state, self.kind, _ENTRIES, counts=("epoch", "delivered", "next_worker", "workers"))
        check_dataset(state, self.dataset)
        seed = saved_seed(state, self.asked)
        for volume, listing in zip(self.volumes, state["listings"], strict=False):
            volume.source.check_listing({"listing": listing})
        found = {
            "world_size": runtime.world_size(), "rank": runtime.rank(), "workers": self.workers,
            "batch_size": self.batching.size, "drop_last": self.batching.drop_last,
        }  # fmt: skip
        if {len(state[name]) for name in ("delivered", "ended", "snapshots")} != {max(1, state["workers"])}:
            raise PositionError(
                f"the saved position is damaged: it was made with {state['workers']} workers and tells of "
                f"{len(state['delivered'])}, {len(state['ended'])} and {len(state['snapshots'])} (delivered, ended, "
                "snapshots). Load a state as DataLoader.state_dict gave it, or start without it."
            )
        saved = StreamResume(
            delivered=tuple(state["delivered"]), ended=tuple(state["ended"]), next_worker=state["next_worker"],
            snapshots=tuple(state["snapshots"]),
        )  # fmt: skip
        if not saved.is_start:
            require_same(
                state, found, "Resume with the same, or (where the data set has no state of its own) from an epoch's "
                "edge; a data set that gives one sample a file continues with any",
            )  # fmt: skip
        self._go(state["epoch"])
        self.seed, self.ended = seed, False
        if saved.is_start:
            return
        self._origin = self._now = saved
        told = any(snapshot is not None for snapshot in self._origin.snapshots)
        self._resuming = told or any(self._origin.delivered) or any(self._origin.ended)
