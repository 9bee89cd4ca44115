"""Batches of iterable data sets that cannot be counted; what runs inside a loader's worker for free.py."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import IterableDataset

from sgpu.contract.errors import SgpuError
from sgpu.data.dataset import VolumeDataset
from sgpu.data.measuring.work import Stopwatch
from sgpu.data.ordering.draws import Draws
from sgpu.data.ordering.generators import seed_all
from sgpu.data.ordering.order import mix, mixed
from sgpu.data.ordering.sizes import Batching
from sgpu.data.positions.streams import END, Envelope, Field, Kind, tell_epoch, undisturbed, whose


@dataclass(frozen=True, kw_only=True)
class StreamResume:
    """Where each worker's stream is. Tuples have one item a worker.

    Attributes:
        delivered: batches that it gave in this epoch.
        ended: whether it has no more.
        next_worker: whose turn it is.
        snapshots: its data set's own state; None: as it was made.
    """

    delivered: tuple[int, ...]
    ended: tuple[bool, ...]
    next_worker: int
    snapshots: tuple[Any, ...]

    @classmethod
    def fresh(cls, workers: int, snapshots: tuple[Any, ...] | None = None) -> StreamResume:
        return cls(
            delivered=(0,) * workers, ended=(False,) * workers, next_worker=0,
            snapshots=(None,) * workers if snapshots is None else snapshots,
        )  # fmt: skip

    @property
    def is_start(self) -> bool:
        """Whether it is an epoch's start and nothing else, which any world and workers have in common."""
        return not any(self.delivered) and not any(self.ended) and all(item is None for item in self.snapshots)

    def after(self, worker: int, *, ended: bool, snapshot: Any) -> StreamResume:
        """Once `worker` gave a batch, or its end."""
        delivered, ends, snapshots = list(self.delivered), list(self.ended), list(self.snapshots)
        delivered[worker] += not ended
        ends[worker] = ended
        snapshots[worker] = snapshot
        return replace(
            self, delivered=tuple(delivered), ended=tuple(ends), snapshots=tuple(snapshots),
            next_worker=(worker + 1) % len(delivered),
        )  # fmt: skip


class FreeStream(IterableDataset[Envelope]):
    """Batches of one worker's stream.

    It never ends by itself: at its end it goes on saying so. torch would otherwise hand the turns of a worker that
    ended to others at a moment that depends on timing, and the order could not be repeated.
    """

    def __init__(
        self, dataset: Any, volumes: list[VolumeDataset], batching: Batching, with_state: bool, block: torch.Tensor
    ) -> None:
        self.dataset, self.volumes, self.batching = dataset, volumes, batching
        self.with_state, self.block = with_state, block
        self.resume: StreamResume | None = None
        self._base: tuple[int, bytes] | None = None
        self._finished = False

    def __iter__(self) -> Iterator[Envelope]:
        told = [int(value) for value in self.block.tolist()]
        worker, workers = whose()
        resume = self.resume if told[Field.RESUMING] else None
        if resume is not None and worker < resume.next_worker:
            yield Envelope(Kind.NOTHING, -1, worker)
        if resume is not None and resume.ended[worker]:
            snapshot = pickle.dumps(resume.snapshots[worker]) if self.with_state else None
            if self.with_state:
                self.dataset.load_state_dict(resume.snapshots[worker])
            self._finished = True
            while True:
                yield Envelope(Kind.END, -1, worker, snapshot=snapshot)
        with undisturbed():
            iterator = self._begin(told, resume, worker)
        delivered = resume.delivered[worker] if resume is not None else 0
        number = delivered if self.with_state else 0
        stem = mix(told[Field.SEED], told[Field.EPOCH], told[Field.RANK] * workers + worker)
        while True:
            with undisturbed():
                envelope = self._make(iterator, number, stem, worker, wanted=number >= delivered)
            if envelope.kind != Kind.BATCH:
                break
            if number >= delivered:
                yield envelope
            number += 1
        self._finished = envelope.kind == Kind.END
        while True:
            yield envelope

    def _begin(self, told: list[int], resume: StreamResume | None, worker: int) -> Iterator[Any]:
        epoch = told[Field.EPOCH]
        for volume in self.volumes:
            volume.set_world(told[Field.RANK], told[Field.WORLD])
            volume.restart(epoch)
        tell_epoch(self.dataset, epoch)
        Draws(self.dataset).begin_held(mix(told[Field.SEED], epoch))
        if self.with_state:
            self._start_from(epoch, None if resume is None else resume.snapshots[worker])
        self._finished = False
        return iter(self.dataset)

    def _start_from(self, epoch: int, snapshot: Any) -> None:
        """A position that was loaded, or what an abandoned pass began with, or how a whole pass left the data set."""
        if snapshot is not None:
            self.dataset.load_state_dict(snapshot)
            self._base = epoch, pickle.dumps(snapshot)
        elif self._base is not None and (self._base[0] == epoch or not self._finished):
            self.dataset.load_state_dict(pickle.loads(self._base[1]))
            self._base = epoch, self._base[1]
        else:
            self._base = epoch, pickle.dumps(self.dataset.state_dict())

    def _make(self, iterator: Iterator[Any], number: int, stem: int, worker: int, wanted: bool) -> Envelope:
        watch, items = Stopwatch(), list[Any]()
        try:
            while len(items) < self.batching.step:
                seed_all(mixed(stem, number * self.batching.step + len(items)))
                item = next(iterator, END)
                if item is END:
                    break
                items.append(item)
            if not items or (self.batching.drop_last and len(items) < self.batching.step):
                return Envelope(Kind.END, number, worker, snapshot=self._snapshot())
            watch.samples_made()
            data = self.batching.finish(items) if wanted else None
            return Envelope(Kind.BATCH, number, worker, len(items), data, self._snapshot(), work=watch.work())
        except SgpuError as problem:
            return Envelope(Kind.ERROR, number, worker, data=problem)

    def _snapshot(self) -> bytes | None:
        """Pickled at once: the data set goes on changing while the batch travels."""
        return pickle.dumps(self.dataset.state_dict()) if self.with_state else None
