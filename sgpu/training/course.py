"""What the loop's counters mean: which batch completes a step, which an epoch, and when the run has done it all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgpu.contract.errors import InputError
from sgpu.contract.failpoint import failpoint
from sgpu.training.position import Position
from sgpu.training.progress import Progress


class Course:
    """Order of calls: `took` after each batch, then, where `completes_step` said so before, `stepped`.

    Args:
        accumulate: batches a step; None: as the loader says, where its global batches come in parts, or 1.
    """

    def __init__(
        self,
        loader: Any,
        position: Position,
        progress: Progress,
        *,
        epochs: int,
        max_steps: int | None,
        accumulate: int | None,
    ) -> None:
        self._loader, self._position, self._progress = loader, position, progress
        self._epochs, self._max_steps = epochs, max_steps
        self.accumulate = _accumulate(loader, accumulate)
        self._in_group = 0  # a checkpoint is of whole groups, so that one begins with each start
        self._is_last = False  # of its epoch the batch in hand, as one that nobody counted has shown

    @property
    def done(self) -> bool:
        if self._max_steps is not None and self._progress.step >= self._max_steps:
            return True
        return self._loader is not None and self._progress.epoch >= self._epochs

    @property
    def completes_step(self) -> bool:
        """Whether the batch in hand is the last of its step."""
        return self._in_group + 1 >= self.accumulate or self.completes_epoch

    @property
    def completes_epoch(self) -> bool:
        """Whether the batch in hand is the last of its epoch, as far as that is known."""
        return self._is_last or (self._loader is not None and self._progress.batch + 1 == self.batches())

    def batches(self) -> int | None:
        """Of the present epoch; None: nobody knows."""
        return self._position.batches(self._progress.epoch)

    def left_without_loader(self) -> range:
        """What a loop without a loader counts."""
        return range(self._progress.step * self.accumulate, (self._max_steps or 0) * self.accumulate)

    def looking_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches. Where nobody counts them, one is taken ahead in a step that the epoch's end may cut short.

        None is ahead at the end of a step, so that a checkpoint has the position after the batch in hand.
        """
        self._is_last = False
        return batches if self.accumulate == 1 or self.batches() is not None else self._one_ahead(batches)

    def _one_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        nothing = object()
        batch = next(batches, nothing)
        while batch is not nothing:
            in_the_middle = self._in_group + 1 < self.accumulate
            later = next(batches, nothing) if in_the_middle else nothing
            self._is_last = in_the_middle and later is nothing
            yield batch
            if self._is_last:
                return
            batch = later if in_the_middle else next(batches, nothing)

    def exhaust(self, batches: Iterator[Any]) -> None:
        """After the last batch: lets the loader end its epoch, and does not believe a wrong length."""
        if next(batches, self) is not self:
            raise InputError(
                f"len(loader) is {self.batches()}, but it gave more batches; mend __len__ of its data set, or remove it"
            )

    def no_batch(self) -> InputError:
        """What is wrong with a loader whose epoch has none."""
        return InputError(
            f"the loader gave no batch in epoch {self._progress.epoch}: its data set is empty, or smaller than one "
            "batch with drop_last=True"
        )

    def took(self) -> None:
        """The batch in hand was trained, and it completes no step."""
        self._progress.batch += 1
        self._in_group += 1

    def stepped(self) -> None:
        """The batch in hand was trained, and with it a step."""
        self._progress.batch += 1
        self._progress.step += 1
        self._in_group = 0

    def next_epoch(self) -> None:
        failpoint("training.epoch")
        self._progress.epoch += 1
        self._progress.batch = self._in_group = 0
        self._is_last = False

    def total_steps(self) -> int | None:
        """Of the whole run, as far as that is known."""
        if self._loader is None:
            return self._max_steps
        progress = self._progress
        present, later = self.batches(), self._position.batches(progress.epoch + 1)
        if present is None or later is None:
            return self._max_steps
        total = progress.step
        if progress.epoch < self._epochs:
            total += -(-(present - progress.batch) // self.accumulate)
            total += -(-later // self.accumulate) * (self._epochs - progress.epoch - 1)
        return total if self._max_steps is None else min(total, self._max_steps)


def _accumulate(loader: Any, asked: int | None) -> int:
    parts = getattr(loader, "accumulate", 1)
    parts = parts if isinstance(parts, int) else 1  # another library's loader may mean something else
    if asked is not None and parts > 1 and asked != parts:
        raise InputError(
            f"TrainLoop(accumulate={asked}): the loader gives its global batch of {loader.global_batch_size} samples "
            f"in {parts} parts (batch_size {loader.batch_size}); leave accumulate out, and a step is one global batch"
        )
    return parts if asked is None else asked
