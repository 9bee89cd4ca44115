"""How a loader knows its position, by the kind of its data set; the main process' side of streams.py.

| data set | position | continues with |
|---|---|---|
| VolumeDataset (or wrapped, one sample a file); map-style without a sampler | samples of our order | any world |
| map-style with the user's sampler | batches | the same world size and batches; at an epoch's edge any |
| iterable with `state_dict` | its own states, one a worker | the same world size, workers and batches |
| the same with `files_at_a_time` | files, and samples in them | any world, by the states of all ranks |
| any other iterable | batches a worker, read again | as with a sampler, and the same workers |

Each is exact, or refuses by name.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import Dataset

from sgpu.contract.errors import DataError, PositionError
from sgpu.data.ordering.walk import WalkPlan
from sgpu.data.positions.streams import Envelope, Token
from sgpu.data.source import Source

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Inner:
    """What the torch loader underneath is made of: finished batches from `dataset`, or one for each token."""

    dataset: Dataset[Envelope]
    tokens: Iterable[list[Token]] | None = None


class Pipeline(Protocol):
    """Order of calls: `rewind` at iter, `begin` before the first batch, `accept` for each envelope until `ended`."""

    epoch: int
    ended: bool
    settles: bool
    """Whether `state` is only final once it is known what comes next."""

    counted_by_torch: bool
    """Whether torch's own idea of a loader's length is as good as any."""

    def inner(self) -> Inner:
        """Made once, and again after `load` where `settles`; else what changes goes through shared numbers."""

    def rewind(self) -> None:
        """Back to where the present epoch begins: its start, or the position that was loaded."""

    def begin(self) -> None:
        """Tells the workers what to do from their next iteration on."""

    def accept(self, envelope: Envelope) -> bool:
        """Counts a batch as handed out; False: it is none."""

    def set_epoch(self, epoch: int) -> None:
        """Another epoch from its start; the present one stays where it is."""

    def state(self) -> dict[str, Any]:
        """The position after what was accepted, as plain values."""

    def load(self, state: dict[str, Any]) -> None:
        """Makes a saved position the one to begin with."""

    def steps(self) -> int:
        """Batches of a whole epoch. TypeError where nobody knows."""

    def left(self) -> int | None:
        """Batches from the position to the end of its epoch; None where `steps` less those counted is right."""

    def ran_out(self) -> None:
        """The workers ended: the next epoch is due, or it is an error."""

    def at(self) -> tuple[int, int]:
        """Epoch and cursor, where `future` tells what comes after them."""

    def future(self) -> tuple[Source, WalkPlan] | None:
        """The files that will be wanted, where that is known."""


def workers_ended() -> DataError:
    return DataError("the workers ended before their last batch; this is a defect of sgpu.data")


def check_kind(state: Any, kind: str, needs: tuple[str, ...], *, counts: tuple[str, ...] = ()) -> None:
    """Refuses what is no state of a loader, one of another kind of data set, and one that lost some of its entries.

    Args:
        counts: those of `needs` that are whole numbers, 0 or more, or lists of them.
    """
    if not isinstance(state, dict) or "kind" not in state or state.get("version") != VERSION:
        raise PositionError(
            f"expected what DataLoader.state_dict gave (version {VERSION}); found {type(state).__name__} {state!r:.80}"
        )
    if state["kind"] != kind:
        raise PositionError(
            f"the position was saved by a loader of kind {state['kind']!r}; this one is of kind {kind!r}. "
            "Make the data set and loader as they were, or start without this state.",
            saved=state["kind"], found=kind,
        )  # fmt: skip
    missing = [name for name in needs if name not in state]
    if missing:
        raise PositionError(
            f"the saved position is not whole: it has no {', '.join(missing)}. Load a state as DataLoader.state_dict "
            "gave it, or start without it.",
            missing=missing,
        )  # fmt: skip

    for name in counts:
        values = state[name] if isinstance(state[name], list | tuple) else [state[name]]
        if any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in values):
            raise PositionError(
                f"the saved position is damaged: {name} is {state[name]!r:.80}; expected whole numbers, 0 or more. "
                "Load a state as DataLoader.state_dict gave it, or start without it.",
                saved={name: repr(state[name])},
            )  # fmt: skip


def check_dataset(state: dict[str, Any], dataset: object) -> None:
    """Another class may be the same data under a new name, so it is told, not refused; so many samples it has."""
    name = type(dataset).__name__
    if state.get("dataset", name) != name:
        warnings.warn(
            f"the position was saved over a {state['dataset']} and goes on over a {name}. If these are other data, "
            "start without this state.",
            stacklevel=5,
        )


def require_same(state: dict[str, Any], found: dict[str, Any], advice: str) -> None:
    """Refuses a state that was saved under other circumstances, naming each."""
    other = {name: value for name, value in found.items() if state[name] != value}
    if other:
        told = ", ".join(f"{name} was {state[name]} and is {value}" for name, value in other.items())
        raise PositionError(
            f"the saved position cannot be continued exactly: {told}. {advice}.",
            saved={name: state[name] for name in other}, found=other,
        )  # fmt: skip
