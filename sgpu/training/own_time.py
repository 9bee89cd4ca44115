"""What of a step is a rank's own: neither a wait for data nor for other ranks. It tells who holds the others up.

In synchronous training all ranks take the same time for a step, since each waits for the slowest. With
DistributedDataParallel that wait is inside the backward pass: DDP reduces gradients beside it, and waits for the last
of them at its end. So a rank's own time is: from the batch to DDP's forward; from there, once DDP has synchronised its
buffers, until the last gradient is there; and from the optimizer's step to the end of the loop's body.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

_MOST_HOOKS = 32  # parameters whose gradients are noted: about a microsecond each


class OwnTime:
    """Order of calls: `begin` with each batch, `pause` when the body is done with it; `take` after a step; `close`.

    A stretch that may hold a wait is not counted: what follows the last gradient, up to the optimizer's step. On a GPU
    it is the host's time that is counted, and what the host waits for. Without DDP nothing can be told.

    Args:
        clock: seconds, for tests.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._since: float | None = None
        self._after_gradient = False
        self._seconds = 0.0
        self._handles: list[Any] = []
        if isinstance(model, DistributedDataParallel):
            self._hook(model, optimizer)

    @property
    def measures(self) -> bool:
        return bool(self._handles)

    def begin(self) -> None:
        """A batch is in hand."""
        if self._handles:
            self._resume()

    def pause(self) -> None:
        """The body is done with its batch, or begins to wait for others."""
        if self._since is not None and not self._after_gradient:
            self._seconds += self._clock() - self._since
        self._since = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens inside waits for other ranks."""
        self.pause()
        try:
            yield
        finally:
            self.begin()

    def take(self) -> float:
        """Seconds since the last call; 0 where nothing can be told."""
        self.pause()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Takes the hooks off the model and the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _resume(self, *_: Any) -> None:
        self._since, self._after_gradient = self._clock(), False

    def _forward(self, *_: Any) -> None:
        """DDP's forward begins: where it has buffers to synchronise, it waits for rank 0."""
        self.pause()

    def _gradient(self, *_: Any) -> None:
        """A gradient is there: all up to here was the rank's own."""
        if self._since is not None:
            now = self._clock()
            self._seconds += now - self._since
            self._since, self._after_gradient = now, True

    def _hook(self, model: DistributedDataParallel, optimizer: Any) -> None:
        parameters: list[Any] = [one for one in model.parameters() if one.requires_grad and one.is_leaf]
        self._handles.append(model.register_forward_pre_hook(self._forward))
        self._handles.append(model.module.register_forward_pre_hook(self._resume))
        for parameter in parameters[:: -(-len(parameters) // _MOST_HOOKS) or 1]:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient))
        if hasattr(optimizer, "register_step_pre_hook"):
            self._handles.append(optimizer.register_step_pre_hook(self._resume))
