"""Who finishes a staged save: a helper process (helper_writer.py), or a thread of the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgpu.checkpoint.helper.finish import finish
from sgpu.checkpoint.helper.replica import Failures
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing.commit import Patience
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.checkpoint.writing.segment import Segment
from sgpu.checkpoint.writing.write import WrittenFile
from sgpu.contract.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class Image:
    """A staged share that a helper holds in memory."""

    job: SaveJob
    written: tuple[WrittenFile, ...]
    segment: Segment


class LeftError(CheckpointError):
    """Its trainer let go of a save that the helper finishes all the same."""


class Writer(Protocol):
    """Order of calls: `held`, `fetch`, `release`, `settle` before the first `save`; `save` one at a time; `close` last.

    Attributes:
        outlives: whether what was handed over is finished also when this process ends.
        node: this node's number, where images can be fetched from others and by them; else None.
        alone: why nothing is copied to other nodes, although that was asked for; else None.
    """

    segment: Segment
    outlives: bool
    node: int | None
    alone: str | None

    def save(self, job: SaveJob, mark: int, on_handed: Callable[[], None]) -> float:
        """Blocks until there is a checkpoint; its (monotonic) time. `on_handed` when the helper has all it needs.

        Raises:
            CheckpointSaveError: there is none; the other ranks have been told.
        """

    def hurry(self, seconds: float) -> None:
        """The save under way, and later ones, wait no longer than this for other ranks."""

    def settle(self) -> None:
        """Waits until nothing is written from the segment that a former trainer left."""

    def held(self) -> list[Image]:
        """What lies in this node's memory, complete; the images' segments are the caller's to close."""

    def fetch(self, folder: str, wanted: Mapping[int, Sequence[int]]) -> list[Image]:
        """Images of a checkpoint that only other nodes have: rank -> nodes to ask, in order. Segments as with `held`.

        Raises:
            CheckpointError: not all could be fetched.
        """

    def release(self) -> None:
        """What was fetched is not needed any more."""

    def not_copied(self) -> Failures:
        """Copies to a neighbour's memory that are known to have been given up since the last call."""

    def leave(self) -> None:
        """Lets go of what was handed over, as where this process ends; a `save` under way raises LeftError."""

    def close(self) -> None:
        """Ends what this writer started."""


class ThreadWriter:
    """Finishes in the calling (background) thread: for stores that only this process has."""

    outlives = False
    node: int | None = None
    alone: str | None = "its store is known to this process only"

    def __init__(self, store: Store, patience_seconds: float) -> None:
        self.segment = Segment()
        self._store = store
        self._patience_seconds = patience_seconds

    def save(self, job: SaveJob, mark: int, on_handed: Callable[[], None]) -> float:
        on_handed()
        return finish(self._store, self.segment.view(), job, Patience(seconds=lambda: self._patience_seconds))

    def hurry(self, seconds: float) -> None:
        self._patience_seconds = min(seconds, self._patience_seconds)

    def settle(self) -> None:
        return

    def held(self) -> list[Image]:
        return []

    def fetch(self, folder: str, wanted: Mapping[int, Sequence[int]]) -> list[Image]:
        raise CheckpointError(f"{folder}: this process knows no other nodes")

    def release(self) -> None:
        return

    def not_copied(self) -> Failures:
        return Failures()

    def leave(self) -> None:
        self.segment.close()

    def close(self) -> None:
        self.segment.close()
