"""Memory that a loader's workers and the loop's process share: each worker's slots, for one batch each."""

from __future__ import annotations

import itertools
import mmap
import os
import weakref
from multiprocessing.reduction import DupFd
from typing import Any

_MOST_BYTES = 128 << 20
_SLOT_BYTES = 16 << 20

_numbers = itertools.count()


class Slots:
    """A byte for each slot, which says whether it is taken, then the slots. Pages take memory once they are written.

    A worker takes a slot of its own, and the process that made all of them gives it back: each byte is written by one
    side at a time, and there is no lock that a killed worker could hold. Not in /dev/shm, which is small in many
    containers, and without a name that could stay behind.

    Order of calls: made before the workers start, by fork or any other way; in a worker `take` and, if the slot was
    not sent, `give_back`; where it was received `give_back`.
    """

    def __init__(self, *, workers: int, each: int) -> None:
        """`each`: slots a worker. OSError where the system has no such memory to give."""
        self.number, self.each = next(_numbers), each
        self.slot_bytes = min(_SLOT_BYTES, _MOST_BYTES // (workers * each)) // mmap.PAGESIZE * mmap.PAGESIZE
        self._head = -(-workers * each // mmap.PAGESIZE) * mmap.PAGESIZE
        self._all_bytes = self._head + workers * each * self.slot_bytes
        file = os.memfd_create("sgpu-batches")
        try:
            os.ftruncate(file, self._all_bytes)
        except OSError:
            os.close(file)
            raise
        self._map(file)
        _known[self.number] = self

    def _map(self, file: int) -> None:
        self._file = file
        weakref.finalize(self, os.close, file).atexit = False
        self.memory = memoryview(mmap.mmap(file, self._all_bytes))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": DupFd(self._file), "memory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map(state["_file"].detach())

    def take(self, worker: int) -> int | None:
        """A free slot of the worker that asks; None: all are on their way."""
        for slot in range(worker * self.each, (worker + 1) * self.each):
            if not self.memory[slot]:
                self.memory[slot] = 1
                return slot
        return None

    def give_back(self, slot: int) -> None:
        self.memory[slot] = 0

    def begin(self, slot: int) -> int:
        """Where the slot's bytes begin in `memory`."""
        return self._head + slot * self.slot_bytes

    @property
    def taken(self) -> int:
        """Slots that are written, on their way or read now."""
        return sum(self.memory[: self._head])


_known: weakref.WeakValueDictionary[int, Slots] = weakref.WeakValueDictionary()


def known(number: int) -> Slots:
    """Those that this process made, by the number that came with a batch."""
    return _known[number]


def slots_for(workers: int, each: int) -> Slots | None:
    """None where the system has none (no memfd_create, or no memory): batches then go as torch sends them."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return Slots(workers=workers, each=each)
    except OSError:
        return None
