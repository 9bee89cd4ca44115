"""Small parts of a loader: one pass of the torch loader underneath, the loop's iterator, a worker's first act."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import get_worker_info

from sgpu import settings
from sgpu.contract.errors import DataError
from sgpu.data.positions.streams import Envelope
from sgpu.data.workers.transport import Sealing, collate_unshared

_MOST_WORKERS = 4


class Pass:
    """One iteration of the torch loader underneath."""

    def __init__(self, source: Iterator[Envelope], version: int, remote: bool) -> None:
        self._source, self.version, self._remote = source, version, remote
        self.pending: Envelope | None = None
        self._failed = False

    def next(self) -> Envelope | None:
        """The next envelope; None where the workers have ended."""
        if self._failed:
            raise DataError("an earlier batch of this iteration failed; iterate anew, or load a state first")
        envelope, self.pending = self.pending, None
        try:
            return envelope if envelope is not None else next(self._source, None)
        except BaseException as problem:
            self._failed = True
            if (
                self._remote
                and isinstance(problem, EOFError | ConnectionError)
                and not str(problem).startswith("Caught")
            ):
                raise DataError(
                    "a worker process of the loader died while it sent a batch: killed, or out of memory. Look at the "
                    "machine's memory, or use fewer workers."
                ) from problem.with_traceback(None)
            if self._remote:  # torch's frames tell nothing, and a traceback that holds them keeps the workers alive
                raise problem.with_traceback(None)  # noqa: B904
            raise

    def close(self) -> None:
        """Lets go of the workers, whoever still holds this pass."""
        self._source, self._failed = iter(()), True

    def finish(self, drain: bool) -> None:
        """Lets workers that do not live on end by themselves."""
        if drain:
            next(self._source, None)


class Epoch(Iterator[Any]):
    """What the loop iterates."""

    def __init__(self, take: Callable[[int], Any], number: int) -> None:
        self._take, self._number = take, number

    def __next__(self) -> Any:
        return self._take(self._number)


class WorkerInit:
    """The user's `worker_init_fn` finds the user's data set in `get_worker_info()`, not ours around it."""

    def __init__(self, told: Callable[[int], None] | None, sealing: Sealing) -> None:
        self.told, self.sealing = told, sealing

    def __call__(self, worker: int) -> None:
        if self.sealing.slots is not None:
            collate_unshared()
        info = get_worker_info()
        if info is not None:
            ours: Any = info.dataset
            object.__setattr__(info, "dataset", ours.dataset)  # frozen in some versions of torch, guarded in others
        if self.told is not None:
            self.told(worker)


def default_workers() -> int:
    """A few, within the CPUs that this process may use, shared with the other ranks of the node."""
    here = settings.worker_environment()
    return max(1, min(_MOST_WORKERS, len(os.sched_getaffinity(0)) // (here.local_world_size if here else 1)))
