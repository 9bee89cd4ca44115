"""Which folder a save goes to: one never used before, the same on all ranks."""

from __future__ import annotations

import logging

from sgpu.checkpoint.format import names
from sgpu.checkpoint.restoring.ranks import Ranks
from sgpu.checkpoint.stores import trouble
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing import ownership
from sgpu.contract.errors import CheckpointError

log = logging.getLogger("sgpu.checkpoint")


class Attempts:
    """Agrees on a number with the other ranks when made, and counts alike with them from then on.

    Raises:
        CheckpointError: the store cannot be written, or another run has it.
    """

    def __init__(self, store: Store, ranks: Ranks, generation: int) -> None:
        self._store = store
        self._first = ranks.rank == 0
        self._generation = generation
        self._used: set[int] = set()
        told: int | CheckpointError = 0
        if self._first:
            try:
                told = _claimed(store, generation)
            except OSError as error:
                told = trouble.not_written(error, store)
            except CheckpointError as error:
                told = error
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
        ownership.claim_next(self._store, self.number, self._generation)
        self._store.delete(names.claim_name(self._claimed))  # its saves have ended: what they left may be cleared
        self._claimed = self.number

    def close(self) -> None:
        """The root may be another run's from now on."""
        if not self._first:
            return
        try:
            ownership.note_seen(self._store, self._claimed, ended=True)
        except OSError as error:
            log.warning("%s could not be given back, and stays this process' until it ends: %s", self._store.url, error)


def _claimed(store: Store, generation: int) -> int:
    """As `ownership.claim`; a disk that fails once must not end a run that has not begun."""
    try:
        return ownership.claim(store, generation)
    except OSError as error:
        if store.local_root is None or not trouble.may_heal(error):  # a remote one has been asked again already
            raise
        log.warning("%s failed, and is asked once more: %s", store.url, error)
    return ownership.claim(store, generation)
