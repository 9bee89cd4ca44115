"""What of a step is a rank's own: neither a wait for data nor for other ranks. It tells who holds the others up.

In synchronous training all ranks take the same time for a step, since each waits for the slowest. Where it waits:

- DistributedDataParallel: inside the backward pass, beside which it reduces gradients, for the last of them at its end.
  So a rank's own time is: from the batch to DDP's forward; from there, once DDP has synchronised its buffers, until the
  last gradient is there; and from the optimizer's step to the end of the loop's body.
- `fully_shard` (FSDP2): before each sharded module's forward, for its parameters, and all through the backward. Own is:
  from the batch to the model's forward; inside sharded modules that hold no others; and from the optimizer's step on.
- a loop that reduces by itself: where it says so (`sgpu.runtime.waiting`). All else of its body is its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sgpu import runtime

_MOST_HOOKS = 32  # parameters whose gradients are noted: about a microsecond each
_MOST_MODULES = 16  # sharded modules whose forward is timed: about two microseconds each; they stand for all


class OwnTime:
    """Order of calls: `begin` with each batch, `pause` when the body is done with it; `take` after a step; `close`.

    A stretch that may hold a wait is not counted: what follows the last gradient, up to the optimizer's step; with
    `fully_shard` all from the end of the forward on. On a GPU it is the host's time that is counted, and what the host
    waits for. Of a model that is neither, nothing can be told until a wait was declared.

    Args:
        clock: seconds, for tests.
    """

    def __init__(
        self, model: Any = None, optimizer: Any = None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._since: float | None = None
        self._waited = 0.0
        self._after_gradient = False
        self._in_forward, self._scale = False, 1.0
        self._seconds = 0.0
        self._handles: list[Any] = []
        if isinstance(model, DistributedDataParallel):
            self._hook(model)
        elif isinstance(model, nn.Module):
            self._hook_sharded(model)
        if self._handles and hasattr(optimizer, "register_step_pre_hook"):
            self._handles.append(optimizer.register_step_pre_hook(self._resume))

    @property
    def measures(self) -> bool:
        return bool(self._handles) or runtime.waited_seconds() > 0

    def begin(self) -> None:
        """A batch is in hand."""
        if self.measures:
            self._resume()

    def pause(self) -> None:
        """The body is done with its batch, or begins to wait for others."""
        if self._since is not None and not self._after_gradient:
            self._seconds += self._passed()
        self._since, self._in_forward = None, False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What happens inside waits for other ranks."""
        counted = self._since is not None and not self._after_gradient
        self.pause()
        try:
            yield
        finally:
            if counted:
                self._resume()

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
        self._waited = runtime.waited_seconds()

    def _passed(self) -> float:
        """Since it was resumed, without what was declared to be a wait."""
        since = self._since if self._since is not None else self._clock()
        return self._clock() - since - (runtime.waited_seconds() - self._waited)

    def _forward(self, *_: Any) -> None:
        """DDP's forward begins: where it has buffers to synchronise, it waits for rank 0."""
        self.pause()

    # ---- DistributedDataParallel

    def _gradient(self, *_: Any) -> None:
        """A gradient is there: all up to here was the rank's own."""
        if self._since is not None:
            self._seconds += self._passed()
            self._resume()
            self._after_gradient = True

    def _hook(self, model: DistributedDataParallel) -> None:
        parameters: list[Any] = [one for one in model.parameters() if one.requires_grad and one.is_leaf]
        self._handles.append(model.register_forward_pre_hook(self._forward))
        self._handles.append(model.module.register_forward_pre_hook(self._resume))
        for parameter in parameters[:: -(-len(parameters) // _MOST_HOOKS) or 1]:
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient))

    # ---- fully_shard

    def _begin_forward(self, *_: Any) -> None:
        self.pause()
        self._in_forward = True

    def _end_forward(self, *_: Any) -> None:
        self._in_forward = False

    def _enter(self, *_: Any) -> None:
        """A sharded module has its parameters. Where it runs again in the backward, that is not looked at."""
        if self._in_forward:
            self._resume()

    def _leave(self, *_: Any) -> None:
        if self._in_forward:
            self._seconds += self._scale * self._passed()
            self._since = None

    def _hook_sharded(self, model: nn.Module) -> None:
        inner = [one for one in model.modules() if _is_sharded(one) and not _holds_sharded(one)]
        if not inner or any(map(_is_compiled, model.modules())):  # hooks would be compiled too
            return
        timed: list[Any] = inner[:: -(-len(inner) // _MOST_MODULES)]
        self._scale = len(inner) / len(timed)
        self._handles.append(model.register_forward_pre_hook(self._begin_forward, prepend=True))
        for one in timed:  # `fully_shard` has its own hooks: the module's parameters are here after the first of them
            self._handles.append(one.register_forward_pre_hook(self._enter))
            self._handles.append(one.register_forward_hook(self._leave, prepend=True))
        self._handles.append(model.register_forward_hook(self._end_forward))


def _holds_sharded(module: nn.Module) -> bool:
    return any(_is_sharded(one) for one in module.modules() if one is not module)


def _is_sharded(module: nn.Module) -> bool:
    loaded: Any = sys.modules.get("torch.distributed.fsdp")  # a second to import; without it, no module is sharded
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
