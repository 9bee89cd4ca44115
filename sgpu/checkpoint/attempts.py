"""Which folder a save goes to: one never used before, the same on all ranks."""

from __future__ import annotations

from sgpu.checkpoint import names, retention, trouble
from sgpu.checkpoint.ranks import Ranks
from sgpu.checkpoint.storage import Store
from sgpu.contract.errors import CheckpointError, CheckpointSaveError


class Attempts:
    """Agrees on a number with the other ranks when made, and counts alike with them from then on.

    Raises:
        CheckpointError: the store cannot be written.
    """

    def __init__(self, store: Store, ranks: Ranks, generation: int) -> None:
        self._store = store
        self._first = ranks.rank == 0
        self._used: set[int] = set()
        told: int | CheckpointError = 0
        if self._first:
            try:
                told = retention.claim(store, generation)
            except OSError as error:
                told = trouble.not_written(error, store)
        told = ranks.from_first(told)
        if isinstance(told, CheckpointError):
            raise told
        self.number = told
        self._claimed = told

    def next_folder(self, step: int) -> str:
        """A step that is saved again (also after a failure) goes to a fresh folder."""
        if step in self._used:
            self.number += 1
            self._used.clear()
        self._used.add(step)
        return names.folder_name(step, self.number)

    def claim(self) -> None:
        """Rank 0 makes sure that the number is nobody else's.

        Raises:
            CheckpointSaveError: it is.
        """
        if not self._first or self._claimed == self.number:
            return
        if not self._store.create(names.claim_name(self.number), b"{}"):
            raise CheckpointSaveError(
                f"another job writes checkpoints into {self._store.url}. Give each job a root of its own.",
                path=self._store.url,
            )
        self._claimed = self.number
