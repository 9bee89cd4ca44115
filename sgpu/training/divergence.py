"""A loss that is not finite, or explodes: seen before the step is taken, by all ranks alike, and what is done then."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sgpu.contract import records
from sgpu.contract.errors import DivergenceError, InputError
from sgpu.metrics.recorder import number_of
from sgpu.training.agreement import Agreement
from sgpu.training.progress import Progress
from sgpu.training.session import Session

Action = Literal["stop", "skip", "roll_back"]
_ACTIONS = ("stop", "skip", "roll_back")
_FEWEST = 8  # a median of fewer losses says nothing


@dataclass(frozen=True)
class DivergencePolicy:
    """What `TrainLoop.check` does about a bad loss.

    Attributes:
        action: "stop" ends the run with a `DivergenceError`. "skip" passes the batch over. "roll_back" restarts from
            the newest checkpoint, and passes the batch over when it comes again.
        factor: a loss above so many times the median of the last ones has exploded; None: that is never said.
        window: how many good losses of a rank the median is of.
        most_in_a_row: bad batches in a row that are passed over; one more ends the run.
    """

    action: Action = "stop"
    factor: float | None = 10.0
    window: int = 50
    most_in_a_row: int = 5

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise InputError(f"divergence must be one of {', '.join(map(repr, _ACTIONS))}; found {self.action!r}")
        if self.factor is not None and not 1 < self.factor < math.inf:
            raise InputError(f"DivergencePolicy(factor=...) must be above 1, or None; found {self.factor!r}")
        for name, least in (("window", _FEWEST), ("most_in_a_row", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(
                    f"DivergencePolicy({name}=...) must be a whole number, {least} or more; found {value!r}"
                )


def choose_divergence(asked: DivergencePolicy | str) -> DivergencePolicy:
    """Raises InputError for what is neither a policy nor the name of an action."""
    return asked if isinstance(asked, DivergencePolicy) else DivergencePolicy(asked)  # type: ignore[arg-type]


def limit_of(losses: Sequence[float], policy: DivergencePolicy) -> float:
    """Above it a loss has exploded; infinite where nothing can be said yet, or losses are not positive."""
    if policy.factor is None or len(losses) < _FEWEST:
        return math.inf
    middle = statistics.median(losses)
    return policy.factor * middle if middle > 0 else math.inf


class Divergence:
    """Judges the loss of the batch in hand.

    Its memory, the last good losses and the bad ones in a row, is `progress`'s, so that a restart judges as before.
    """

    def __init__(self, policy: DivergencePolicy, agreement: Agreement, progress: Progress, session: Session) -> None:
        self._policy, self._agreement = policy, agreement
        self._progress, self._session = progress, session
        self._passed_over = _rolled_back(session)

    def check(self, loss: Any) -> bool:
        """Whether all ranks may train on their batches. A collective, and it waits for the loss's device.

        Raises:
            DivergenceError: a loss is bad, and the policy ends the run or rolls it back.
        """
        value, limit = number_of("loss", loss), limit_of(self._progress.losses, self._policy)
        world, rank = self._session.world_size, self._session.rank
        bad = not math.isfinite(value) or value > limit
        known = self._here() in self._passed_over
        said = self._agreement.most(world + 1 if known else rank + 1 if bad else 0)
        if said == 0:
            self._progress.losses = [*self._progress.losses, value][-self._policy.window :]
            self._progress.bad_in_a_row = 0
            return True
        self._progress.bad_in_a_row += 1
        if said <= world:
            self._found(said - 1, value, limit)
        return False

    def _found(self, culprit: int, value: float, limit: float) -> None:
        action: Action = self._policy.action
        if action != "stop" and self._progress.bad_in_a_row > self._policy.most_in_a_row:
            action = "stop"
        epoch, batch, step = self._here()
        if culprit == self._session.rank:
            self._session.emit("diverged", step=step, epoch=epoch, batch=batch, value=repr(value), action=action)
        if action == "skip":
            return
        what = f"the loss of rank {culprit} in step {step} is bad"
        if culprit == self._session.rank:
            expected = "a finite number" if limit == math.inf else f"at most {limit:.4g}"
            what = f"the loss of rank {culprit} in step {step} is {value:.4g}; expected {expected}"
        then = 'it is not trained on; divergence="skip" or "roll_back" would go on without this batch'
        if action == "roll_back":
            then = "the run goes back to its newest checkpoint, and on without this batch"
        elif self._policy.action != "stop":
            then = f"{self._progress.bad_in_a_row} bad batches in a row: leaving out more would not help"
        raise DivergenceError(f"{what} ({then})", rank=culprit, step=step, unrecoverable=action == "stop")

    def _here(self) -> tuple[int, int, int]:
        """Which batch is in hand."""
        return self._progress.epoch, self._progress.batch, self._progress.step + 1


def _rolled_back(session: Session) -> frozenset[tuple[int, int, int]]:
    """The batches that made earlier starts of this run go back."""
    return frozenset(
        (record["epoch"], record["batch"], record["step"])
        for record in records.read_all(session.run.events)
        if record.get("kind") == "diverged" and record.get("action") == "roll_back"
    )
