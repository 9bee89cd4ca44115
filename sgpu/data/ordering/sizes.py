"""How many samples a rank takes at a time, where the batch of all ranks together may be what is fixed."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sgpu.contract.errors import InputError, PositionError


class _LeftOut(int):
    """A default that can be told from the same number given."""


ONE_BY_DEFAULT = _LeftOut(1)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of batches.

    Attributes:
        batch: samples a rank takes at a time; None: single samples, as torch's batch_size=None.
        whole: samples that all ranks take together, `accumulate` times each; None: `batch` is what is fixed.
    """

    batch: int | None
    whole: int | None = None
    accumulate: int = 1


def sizes_of(batch_size: int | None, whole: int | None, *, world: int) -> Sizes:
    """Sizes for a world.

    Args:
        batch_size: as torch has it; with `whole`, the most that a rank takes at a time (`ONE_BY_DEFAULT`: any).
        whole: the global batch; each of `world` ranks takes an equal part.

    Raises:
        InputError: a size is no whole number, or the global batch is none of samples a rank.
    """
    if whole is None:
        try:
            return Sizes(batch=None if batch_size is None else int(operator.index(batch_size)))
        except TypeError:
            raise InputError(f"batch_size must be a whole number, 1 or more, or None; found {batch_size!r}") from None
    if isinstance(whole, bool) or not isinstance(whole, int) or whole < 1:
        raise InputError(f"global_batch_size must be a whole number, 1 or more; found {whole!r}")
    left_out = isinstance(batch_size, _LeftOut)
    if not left_out and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise InputError(
            f"with global_batch_size={whole}, batch_size is the most that a rank takes at a time: a whole number, 1 "
            f"or more, or left out; found {batch_size!r}"
        )
    a_rank, more = divmod(whole, world)
    if more:
        fit = [str(ranks) for ranks in range(1, min(whole, 64) + 1) if whole % ranks == 0]
        raise InputError(
            f"global_batch_size={whole} cannot be shared equally by {world} ranks, also not in several parts. Use a "
            f"number of GPUs that divides it ({', '.join(fit)}), or another global_batch_size.",
            global_batch_size=whole, world_size=world,
        )  # fmt: skip
    most = a_rank if left_out or batch_size is None else batch_size
    parts = next(parts for parts in range(1, a_rank + 1) if a_rank % parts == 0 and a_rank // parts <= most)
    return Sizes(batch=a_rank // parts, whole=whole, accumulate=parts)


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How samples become a batch.

    Attributes:
        size: samples; None: single ones, as torch's batch_size=None.
        whole: the global batch, where that is fixed.
        dealt: for evaluation, whole batches go to the ranks in turn.
    """

    size: int | None
    drop_last: bool
    collate: Callable[[Any], Any]
    whole: int | None = None
    dealt: bool = False

    @property
    def step(self) -> int:
        return self.size or 1

    def finish(self, items: Sequence[Any]) -> Any:
        return self.collate(items[0] if self.size is None else items)


def check_sizes(state: dict[str, Any], batching: Batching, *, world: int) -> None:
    """What of a saved position's batches may be other now: a fixed global batch at an edge, a rank's with a warning.

    Args:
        state: cursor, epoch, batch_size, world_size, global_batch_size (None: not fixed).

    Raises:
        PositionError: the global batch changes in the middle of an epoch, or the position is inside of one.
    """
    whole, saved = batching.whole, state.get("global_batch_size")
    before = saved or state["batch_size"] * state["world_size"]
    now = whole or batching.step * world
    fixed = whole is not None or saved is not None
    changed = before != now if fixed else state["batch_size"] != batching.step
    if whole is not None and state["cursor"]:
        if changed:
            raise PositionError(
                f"the position was saved in the middle of epoch {state['epoch']}, with global batches of {before} "
                f"samples (batch_size {state['batch_size']}, {state['world_size']} ranks); this loader has "
                f"global_batch_size={whole}. Keep {before} to the end of the epoch, or resume from an epoch's edge.",
                saved=before, found=whole,
            )  # fmt: skip
        inside = state["cursor"] % whole
        if inside and (state["batch_size"], state["world_size"]) != (batching.step, world):
            raise PositionError(
                f"the position was saved after {inside} samples of a global batch of {whole}; only "
                f"{state['world_size']} ranks that take {state['batch_size']} samples at a time go on inside of it. "
                "Save after whole ones, as TrainLoop does.",
                saved=inside, found=whole,
            )  # fmt: skip
    elif changed:
        was, goes_on = (f"batch_size {state['batch_size']}", batching.step)
        if fixed:
            was, goes_on = f"global batches of {before} samples", now
        warnings.warn(
            f"the position was saved with {was} and goes on with {goes_on}: no sample is lost or repeated, but steps "
            "and their learning rates are others",
            stacklevel=5,
        )
