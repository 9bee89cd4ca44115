"""What the ranks of one node have handed over, and what has become of it. Without torch; in the helper process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sgpu.checkpoint.helper.finish import finish
from sgpu.checkpoint.helper.guests import Loan, look_at
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing.commit import Patience
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.checkpoint.writing.segment import Segment
from sgpu.checkpoint.writing.write import WrittenFile, sums_of
from sgpu.contract.errors import CheckpointSaveError

Key = tuple[str, int]
SUMS_SECONDS = 5.0  # less than another node waits for an answer


@dataclass(kw_only=True)
class Trainer:
    """One connected trainer. `patience_seconds`: how long its saves wait for others."""

    rank: int
    generation: int
    patience_seconds: float = 600.0
    alive: bool = True


@dataclass(kw_only=True)
class Shelf:
    """The memory of one rank for one root, and the last job in it. It outlives its trainer."""

    segment: Segment
    owner: Trainer
    job: SaveJob | None = None
    mark: int = 0
    running: bool = False
    written: list[WrittenFile] | None = field(default=None)

    @property
    def complete(self) -> bool:
        return self.job is not None and self.segment.mark == self.mark


class Desk:
    """Shared by the threads of all connections.

    Args:
        ranks: those of this node: whether they can still deliver is known here. None: nothing is known of others.
    """

    def __init__(self, ranks: frozenset[int] | None) -> None:
        self._ranks = ranks
        self._news = threading.Condition()
        self._shelves: dict[Key, Shelf] = {}
        self._trainers: list[Trainer] = []

    def arrive(self, trainer: Trainer, patience_seconds: float) -> None:
        """By that, those of its rank from an earlier generation have left, whatever their connections say yet."""
        with self._news:
            former = [each for each in self._trainers if each.rank == trainer.rank]
            for each in former:
                if each.generation < trainer.generation:
                    self.leave(each, patience_seconds)
            self._trainers.append(trainer)

    def leave(self, trainer: Trainer, patience_seconds: float) -> None:
        """Its jobs go on, with less patience."""
        with self._news:
            if trainer.alive:
                trainer.alive = False
                trainer.patience_seconds = min(trainer.patience_seconds, patience_seconds)
                self._trainers.remove(trainer)
                self._news.notify_all()

    def take(self, key: Key, trainer: Trainer) -> Shelf | None:
        """The rank's shelf, if a trainer that is gone left it."""
        with self._news:
            shelf = self._shelves.get(key)
            if shelf is None or shelf.owner.alive:
                return None
            shelf.owner = trainer
            return shelf

    def put(self, key: Key, segment: Segment, trainer: Trainer) -> Shelf:
        """A new shelf; known to others unless a second one of a living trainer's."""
        shelf = Shelf(segment=segment, owner=trainer)
        with self._news:
            known = self._shelves.get(key)
            if known is None or not known.owner.alive or known.owner is trainer:
                self._shelves[key] = shelf
        return shelf

    def run(
        self, shelf: Shelf, store: Store, job: SaveJob, mark: int, trainer: Trainer,
        on_begun: Callable[[], object] = lambda: None,
    ) -> float:  # fmt: skip
        """`finish`, noting how far it is; `on_begun` is told once that can be asked for."""
        with self._news:
            shelf.job, shelf.mark, shelf.running, shelf.written = job, mark, True, None

        def note(written: list[WrittenFile]) -> None:
            with self._news:
                shelf.written = written
                self._news.notify_all()

        patience = Patience(
            seconds=lambda: trainer.patience_seconds,
            may_come=lambda rank: trainer.alive or self._may_come(store.url, rank, job),
            pause=self._pause,
        )
        try:
            on_begun()
            return finish(store, shelf.segment.view(), job, patience, note)
        finally:
            with self._news:
                shelf.running = False
                self._news.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._news:
            self._news.wait(seconds)

    def _may_come(self, url: str, rank: int, job: SaveJob) -> bool:
        """Whether a rank can still hand over its share of a job whose own trainer is gone."""
        with self._news:
            if self._ranks is None or rank not in self._ranks:
                return True
            shelf = self._shelves.get((url, rank))
            if shelf is not None and shelf.running and shelf.job is not None and shelf.job.folder == job.folder:
                return True
            return any(other.rank == rank and other.generation == job.generation for other in self._trainers)

    def wait_until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        with self._news:
            return self._news.wait_for(condition, seconds)

    def idle(self) -> bool:
        return not any(shelf.running for shelf in self._shelves.values())

    def await_writing(self, shelf: Shelf, job: SaveJob, seconds: float) -> None:
        """Waits until this rank's part of a job is written, has failed or is another's by now."""
        self.wait_until(lambda: shelf.job is not job or shelf.written is not None or not shelf.running, seconds)

    def sums(self, shelf: Shelf, job: SaveJob) -> list[WrittenFile]:
        """Checksums of what a job staged: from its writing, unless that takes too long or failed."""
        self.await_writing(shelf, job, SUMS_SECONDS)
        with self._news:
            written = shelf.written if shelf.job is job else None
        return written if written is not None else sums_of(shelf.segment.view(), job.files)

    def images(self, url: str) -> list[Loan]:
        """Complete images of this node's ranks for a root."""
        shelves = [shelf for (where, _), shelf in sorted(self._shelves.items()) if where == url]
        found = []
        for shelf in shelves:
            job = shelf.job
            if job is None or not shelf.complete:
                continue
            written = self.sums(shelf, job)
            if shelf.job is job and shelf.complete:
                found.append(Loan(job=job, written=written, segment=look_at(shelf.segment)))
        return found


def failure_to_json(error: CheckpointSaveError) -> dict[str, object]:
    return {"error": str(error), "facts": error.facts}
