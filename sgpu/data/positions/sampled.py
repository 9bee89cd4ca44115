"""Positions under the user's own sampler: batches are counted, and skipped without loading them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sgpu import runtime
from sgpu.contract.errors import DataError
from sgpu.data.ordering.draws import Draws
from sgpu.data.ordering.generators import preserved, put, take
from sgpu.data.ordering.order import mix
from sgpu.data.ordering.sizes import Batching
from sgpu.data.positions.pipeline import VERSION, Inner, check_dataset, check_kind, require_same
from sgpu.data.positions.seeds import saved_seed, seed_of
from sgpu.data.positions.streams import Envelope, SampledItems, Token


class Sampled:
    """The user's sampler, counted: batches that were handed out are skipped without loading them."""

    def __init__(self, dataset: Any, batching: Batching, *, sampler: Any, seed: int | None) -> None:
        self.dataset, self.batching, self.sampler = dataset, batching, sampler
        self.asked, self.seed = seed, seed_of(seed)
        self.epoch, self.ended = 0, False
        self._start = self._done = 0
        self._told = self._epochs()

    settles = False
    counted_by_torch = True

    def inner(self) -> Inner:
        return Inner(dataset=SampledItems(self.dataset, self.batching), tokens=_Tokens(self))

    def steps(self) -> int:
        return len(self.sampler)

    def left(self) -> int | None:
        return None

    def rewind(self) -> None:
        if (told := self._epochs()) != self._told:  # the user told the sampler itself
            self._told = told
            self.set_epoch(max(told.values()))
        self._done, self.ended = self._start, False

    def _epochs(self) -> dict[int, int]:
        """What samplers that are told of epochs were told last."""
        parts = enumerate((self.sampler, getattr(self.sampler, "sampler", None)))
        told = {place: getattr(part, "epoch", None) for place, part in parts if hasattr(part, "set_epoch")}
        return {place: epoch for place, epoch in told.items() if isinstance(epoch, int)}

    def begin(self) -> None:
        self.rewind()

    def tokens(self) -> Iterator[Token]:
        """The rest of the epoch; runs in the main process, ahead of the loop."""
        for part in (self.sampler, getattr(self.sampler, "sampler", None)):
            tell = getattr(part, "set_epoch", None)
            if callable(tell):
                tell(self.epoch)
        self._told = self._epochs()
        stem = mix(self.seed, self.epoch, runtime.rank())
        serial, before = 0, None
        for number, picked in enumerate(_OwnDraws(self.sampler, (self.seed, self.epoch)).iterate()):
            if before is not None:
                yield before
            indices = [picked] if self.batching.size is None else list(picked)
            before = Token(number, stem, serial, indices, False) if number >= self._start else None
            serial += len(indices)
        if before is not None:
            yield before._replace(last=True)

    def accept(self, envelope: Envelope) -> bool:
        if envelope.number != self._done:
            raise DataError(f"batch {envelope.number} came where {self._done} was due; this is a defect of sgpu.data")
        self._done += 1
        if envelope.last:
            self.ran_out()
        return True

    def ran_out(self) -> None:
        self.epoch, self._start, self._done, self.ended = self.epoch + 1, 0, 0, True

    def at(self) -> tuple[int, int]:
        return self.epoch, 0

    def future(self) -> None:
        return None

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self._start, self._done = epoch, 0, 0

    def state(self) -> dict[str, Any]:
        return {
            "version": VERSION, "kind": "sampled", "dataset": type(self.dataset).__name__,
            "global": self._done == 0, "epoch": self.epoch,
            "batches": self._done, "seed": self.seed, "batch_size": self.batching.size, "rank": runtime.rank(),
            "world_size": runtime.world_size(),
        }  # fmt: skip

    def load(self, state: dict[str, Any]) -> None:
        check_kind(
            state,
            "sampled",
            ("epoch", "batches", "seed", "batch_size", "rank", "world_size"),
            counts=("epoch", "batches"),
        )
        found = {"world_size": runtime.world_size(), "rank": runtime.rank(), "batch_size": self.batching.size}
        if state["batches"]:
            require_same(
                state, found, "Resume with the same, or from an epoch's edge; or leave the sampler out: sgpu's own "
                "order continues with any",
            )  # fmt: skip
        check_dataset(state, self.dataset)
        self.seed, self.epoch, self.ended = saved_seed(state, self.asked), state["epoch"], False
        self._start = self._done = state["batches"]


class _Tokens:
    """A batch sampler for torch; begins anew at each iteration."""

    def __init__(self, pipeline: Sampled) -> None:
        self._pipeline = pipeline

    def __iter__(self) -> Iterator[list[Token]]:
        return ([token] for token in self._pipeline.tokens())


class _OwnDraws:
    """Global generators of a sampler's own: its draws depend on a key alone and disturb nobody's."""

    def __init__(self, sampler: Any, key: tuple[int, ...]) -> None:
        self._sampler = sampler
        with preserved():
            Draws(sampler).begin(mix(*key))
            self._states = take()

    def iterate(self) -> Iterator[Any]:
        iterator: Iterator[Any] | None = None
        while True:
            outside = take()
            put(self._states)
            try:
                if iterator is None:
                    iterator = iter(self._sampler)
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._states = take()
                put(outside)
            yield item
