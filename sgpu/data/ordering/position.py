"""Where an epoch's order is cut into global batches, and who gets which part. Pure.

A position is a number of samples of the order that belong to finished steps. It names neither the world size nor the
workers, so any world continues from it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from sgpu.contract.errors import InputError, PositionError


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The rest of one epoch, from `cursor` on, for the world that there is now.

    A global step takes the next `batch * world` positions, cut into `world` neighbouring parts that differ by at most
    one sample. All ranks take equally many steps. The last global batch may be smaller; a rest that would leave some
    rank without a sample joins the batch before it. `drop_last` drops the rest.

    With `whole`, so many samples are a global batch for any world, taken in `whole / (batch * world)` steps; then
    `drop_last` drops what is no whole one, and a rest with fewer samples than ranks is refused: to join it would make
    another batch of the one before.

    Attributes:
        samples: size of the data set.
        batch: samples a rank and step.
        cursor: positions before it are done.
        whole: a multiple of `batch * world`; None: that itself.
    """

    samples: int
    batch: int
    world: int = 1
    cursor: int = 0
    drop_last: bool = False
    whole: int | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise InputError("the data set is empty: expected at least one sample, found 0")
        if not 0 <= self.cursor <= self.samples:
            raise PositionError(
                f"the saved position is {self.cursor} but the data set has {self.samples} samples; "
                "load the state into the data set that it was made with",
                cursor=self.cursor, samples=self.samples,
            )  # fmt: skip
        if self.cursor == 0:
            self._check_whole()
        elif not self.drop_last and 0 < self.samples - self.cursor < self.world:
            raise PositionError(
                f"{self.samples - self.cursor} samples of this epoch are left for {self.world} ranks, and every rank "
                f"needs one. Resume this step with at most {self.samples - self.cursor} ranks, or go on with the next "
                "epoch by set_epoch.",
                left=self.samples - self.cursor, world_size=self.world,
            )  # fmt: skip

    def _check_whole(self) -> None:
        if self.samples < self.world and not self.drop_last:
            raise InputError(
                f"the data set has {self.samples} samples but there are {self.world} ranks: expected at least one "
                f"sample a rank. Use at most {self.samples} GPUs, or more data.",
                samples=self.samples, world_size=self.world,
            )  # fmt: skip
        if self.samples < (self.whole or self.global_batch) and self.drop_last:
            told = f" ({self.batch} a rank x {self.world} ranks)" if self.whole is None else ""
            raise InputError(
                f"drop_last=True would drop everything: {self.samples} samples are fewer than one global batch of "
                f"{self.whole or self.global_batch}{told}. Use a smaller one, fewer GPUs, or drop_last=False.",
                samples=self.samples, world_size=self.world,
            )  # fmt: skip
        if self.whole is not None and not self.drop_last and 0 < self.samples % self.whole < self.world:
            raise InputError(
                f"the last global batch of an epoch has {self.samples % self.whole} samples ({self.samples} in all, "
                f"global_batch_size={self.whole}), and each of {self.world} ranks needs one. Use drop_last=True, at "
                f"most {self.samples % self.whole} GPUs, or another global_batch_size.",
                samples=self.samples, world_size=self.world, global_batch_size=self.whole,
            )  # fmt: skip

    @property
    def global_batch(self) -> int:
        return self.batch * self.world

    @cached_property
    def steps(self) -> int:
        """Global batches from the cursor to the end of the epoch."""
        dropped = self.samples % self.whole if self.whole is not None and self.drop_last else 0
        full, rest = divmod(max(0, self.samples - dropped - self.cursor), self.global_batch)
        return full if self.drop_last or rest < self.world else full + 1

    def span(self, step: int) -> tuple[int, int]:
        """First and one-past-last position of a global batch; `step` counts from the cursor."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of {self.steps}")
        start = self.cursor + step * self.global_batch
        last = step == self.steps - 1 and not self.drop_last
        return start, self.samples if last else start + self.global_batch

    def part(self, step: int, rank: int) -> tuple[int, int]:
        """What `rank` takes of a global batch: first and one-past-last position."""
        start, stop = self.span(step)
        size, more = divmod(stop - start, self.world)
        first = start + rank * size + min(rank, more)
        return first, first + size + (rank < more)

    def cursor_after(self, step: int) -> int:
        """The position once `step` is done; it is `samples` after the last step, dropped ones counted as done."""
        return self.samples if step == self.steps - 1 else self.span(step)[1]


@dataclass(frozen=True, kw_only=True)
class DealtPlan:
    """The same for evaluation: whole batches, cut without a look at the world, are dealt to the ranks in turn.

    So each batch holds the same samples whoever takes it, and what is computed of it is the same to the bit. Ranks
    differ by at most one batch; a rank may have none.
    """

    samples: int
    batch: int
    world: int
    rank: int
    cursor: int = 0

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise InputError("the data set is empty: expected at least one sample, found 0")

    def _dealt(self) -> range:
        return range(self.cursor // self.batch + self.rank, -(-self.samples // self.batch), self.world)

    @property
    def steps(self) -> int:
        """Batches of this rank."""
        return len(self._dealt())

    def part(self, step: int, rank: int) -> tuple[int, int]:
        """First and one-past-last position of this rank's batch."""
        start = self._dealt()[step] * self.batch
        return start, min(start + self.batch, self.samples)

    def cursor_after(self, step: int) -> int:
        """The position once all ranks have done `step`."""
        return min(self.cursor + (step + 1) * self.batch * self.world, self.samples)


def plan_of(
    *, samples: int, batch: int, world: int, rank: int, cursor: int, drop_last: bool, dealt: bool, whole: int | None
) -> Plan | DealtPlan:
    """How the rest of an epoch is cut: for training, or (dealt) for evaluation."""
    if dealt:
        return DealtPlan(samples=samples, batch=batch, world=world, rank=rank, cursor=cursor)
    return Plan(samples=samples, batch=batch, world=world, cursor=cursor, drop_last=drop_last, whole=whole)
