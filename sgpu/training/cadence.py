"""When to checkpoint: by steps, by seconds, or automatically. All ranks reach the same answer at the same step."""

from __future__ import annotations

import math
from collections.abc import Callable

from sgpu.checkpoint.interval import interval_seconds
from sgpu.contract.policies import CheckpointPolicy

_FIRST_LOOK_STEPS = 10
_PRIOR_MTBF_SECONDS = 4 * 3600.0
_PRIOR_OVERHEAD_SECONDS = 0.05
_LONGEST_SECONDS = 1800.0


class Cadence:
    """Counts steps to the next checkpoint.

    With `every_steps` the answer is arithmetic. Otherwise rank 0 turns seconds into steps from its own measurements, at
    steps that all ranks know beforehand, and `agree` carries its number to the others.

    Args:
        agree: gives every rank what rank 0 passed (a broadcast); called at the same steps on all ranks.
        mtbf_seconds: mean time between this run's failures so far; None: a prior of four hours.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        *,
        step: int,
        agree: Callable[[int], int],
        mtbf_seconds: float | None = None,
    ) -> None:
        self._policy = policy
        self._agree = agree
        self._mtbf_seconds = mtbf_seconds or _PRIOR_MTBF_SECONDS
        self._overhead_seconds = _PRIOR_OVERHEAD_SECONDS
        self._save_seconds = 0.0
        self._since = step
        self._look_at = step + _FIRST_LOOK_STEPS
        self._save_at: int | None = None

    @property
    def automatic(self) -> bool:
        return self._policy.every_steps is None and self._policy.every_seconds is None

    def measured(self, *, blocked_seconds: float, save_seconds: float) -> None:
        """What a finished checkpoint cost; the newest weighs most."""
        self._overhead_seconds = 0.5 * self._overhead_seconds + 0.5 * blocked_seconds
        self._save_seconds = max(save_seconds, 0.5 * self._save_seconds)

    @property
    def save_seconds(self) -> float:
        """What a checkpoint takes until it is durable, by those so far; 0: there was none."""
        return self._save_seconds

    def wanted_seconds(self) -> float:
        """The interval in seconds that the policy or the measurements ask for."""
        if self._policy.every_seconds is not None:
            return self._policy.every_seconds
        wanted = interval_seconds(
            overhead_seconds=self._overhead_seconds,
            mtbf_seconds=self._mtbf_seconds,
            save_seconds=self._save_seconds,
            overhead_budget=self._policy.overhead_budget,
        )
        return min(wanted, _LONGEST_SECONDS)

    def due(self, step: int, *, step_seconds: float) -> bool:
        """Whether to checkpoint after `step`; `step_seconds` is this rank's recent mean."""
        if self._policy.every_steps is not None:
            return step % self._policy.every_steps == 0
        if self._save_at is None and step >= self._look_at:
            ahead = max(1, math.ceil(self.wanted_seconds() / max(step_seconds, 1e-6)))
            self._save_at = max(step, self._since + self._agree(ahead))
        return self._save_at is not None and step >= self._save_at

    def saved(self, step: int) -> None:
        """A checkpoint was taken at `step`, due or not."""
        self._since = step
        self._look_at = step + 1 if self._save_at is not None else step + _FIRST_LOOK_STEPS
        self._save_at = None

    def sentence(self) -> str:
        """Why the interval is what it is."""
        if self._policy.every_steps is not None:
            return f"a checkpoint every {self._policy.every_steps} steps, as asked"
        if self._policy.every_seconds is not None:
            return f"a checkpoint every {self._policy.every_seconds:g} s, as asked"
        return (
            f"a checkpoint every {self.wanted_seconds():.0f} s: one costs {self._overhead_seconds:.3f} s, a failure is "
            f"expected every {self._mtbf_seconds / 3600:.1f} h, and checkpoints may cost "
            f"{self._policy.overhead_budget:.1%} of the time"
        )
