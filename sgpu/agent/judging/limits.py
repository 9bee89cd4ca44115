"""How long a rank may be silent: as the user says, or learned from the steps that the run has completed."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sgpu import settings
from sgpu.contract import atomic
from sgpu.contract.beat import Beat, Section, WorkerState
from sgpu.contract.policies import RestartPolicy
from sgpu.contract.rundir import RunDir

UNLEARNED_SECONDS = 600.0  # a step's limit before there is one of the run's own
_ENOUGH_STEPS = 20
_FACTOR = 10.0  # times the 99th percentile
_LONGEST_FACTOR = 2.0  # times the longest step, which a percentile does not see
_PATIENCE = 3.0  # times a step's limit: what compiles, downloads, allocates, or waits for storage
_GROWTH = 1.1  # from one class of step times to the next
_MOST_COUNTED = 20_000  # then old steps count half
_KEEP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of each section, in seconds.

    Attributes:
        step_seconds: of a step, its data and its collectives.
        long_seconds: of the first step, an epoch's first batch, checkpoints, evaluation and what the user's code
            declares, where it does not say for how long.
        start_seconds: of all before the loop; None: `long_seconds`, where the run is known to have a loop.
        by_name: limits that the user has set.
    """

    step_seconds: float
    long_seconds: float
    start_seconds: float | None = None
    by_name: Mapping[str, float] = field(default_factory=dict)

    def of(self, beat: Beat) -> float:
        """How long the rank may be in its section; infinite where it has promised nothing.

        A function without a loop makes no promise of steps: before its loop, a rank is watched only where its user says
        so, or where the run has trained before, so that there is a loop. After its loop it may do what it likes.
        """
        if beat.state not in (WorkerState.STARTING, WorkerState.TRAINING):
            return math.inf
        if beat.section is Section.INIT and beat.state is WorkerState.STARTING:
            if self.start_seconds is not None:
                return self.start_seconds
            return self.long_seconds if beat.high_step > 0 else math.inf
        if beat.section is Section.USER and not beat.section_name:
            return beat.section_limit_seconds or math.inf
        declared = beat.section in (Section.FIRST_STEP, Section.USER, Section.EVALUATION, Section.CHECKPOINT)
        if beat.state is WorkerState.STARTING and not declared:
            return math.inf
        if beat.section_limit_seconds > 0:
            return beat.section_limit_seconds
        short = beat.section in (Section.STEP, Section.DATA, Section.COLLECTIVE) and not beat.section_name
        return self.by_name.get(name_of(beat), self.step_seconds if short else self.long_seconds)


def name_of(beat: Beat) -> str:
    """Of the section that it is in."""
    return beat.section_name or beat.section.name.lower()


class StepTimes:
    """How long steps take: a histogram in classes that grow by a tenth, in which old steps fade."""

    def __init__(self, classes: Mapping[int, float] | None = None, longest_seconds: float = 0.0) -> None:
        self._classes: dict[int, float] = dict(classes or {})
        self.count, self.longest_seconds = sum(self._classes.values()), longest_seconds

    def add(self, seconds: float, steps: int = 1) -> None:
        """So many steps took about so long."""
        at = math.ceil(math.log(max(seconds, 1e-6), _GROWTH))
        self._classes[at] = self._classes.get(at, 0.0) + steps
        self.count += steps
        self.longest_seconds = max(self.longest_seconds, seconds)
        if self.count > _MOST_COUNTED:
            self._classes = {at: count / 2 for at, count in self._classes.items() if count > 1}
            self.count = sum(self._classes.values())

    @property
    def mean_seconds(self) -> float:
        """Up to a tenth too much; 0 where there are none."""
        return sum(count * _GROWTH**at for at, count in self._classes.items()) / self.count if self.count else 0.0

    def percentile_seconds(self, share: float) -> float:
        """What so many of the steps stay within, up to a tenth too much; 0 where there are none."""
        left = share * self.count
        for at, count in sorted(self._classes.items()):
            left -= count
            if left <= 0:
                return float(_GROWTH**at)
        return 0.0

    def limit_seconds(self, floor_seconds: float) -> float:
        """The longest silence of a rank in a step that is still no hang.

        Ten times the 99th percentile, or twice the longest step (that alone: up to ten minutes), and no less than the
        floor. Ten minutes while there are fewer than 20 steps.
        """
        if self.count < _ENOUGH_STEPS:
            return UNLEARNED_SECONDS
        longest = min(UNLEARNED_SECONDS, _LONGEST_FACTOR * self.longest_seconds)
        return max(floor_seconds, _FACTOR * self.percentile_seconds(0.99), longest)

    def to_json(self) -> dict[str, Any]:
        return {"classes": self._classes, "longest_seconds": self.longest_seconds}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StepTimes:
        """Raises KeyError, TypeError, ValueError: it is no such thing."""
        return cls({int(at): float(count) for at, count in value["classes"].items()}, float(value["longest_seconds"]))


class Learner:
    """The limits of one run, kept in its folder.

    Where `hang_seconds` is a number, that is a step's limit, and none is learned. Otherwise a limit that was learned
    is doubted when it was gone over: the same step has ten minutes when it is done again, and what it takes is learned.
    """

    def __init__(self, run: RunDir, policy: RestartPolicy) -> None:
        self._run, self._policy = run, policy
        self._floor_seconds = settings.hang_floor_seconds()
        self.times, self._doubted_step = StepTimes(), -1
        self._kept: float | None = None
        self._seen: dict[int, tuple[int, int]] = {}
        if self._learns:
            self._read()

    @property
    def _learns(self) -> bool:
        return self._policy.hang_seconds is None

    def observe(self, beats: Sequence[Beat], now: float) -> Limits:
        """Learns from the steps that were completed since the last call; the limits from here on."""
        self._time(beats)
        if self._policy.hang_seconds is not None:
            return self._limits(self._policy.hang_seconds, self._policy.hang_seconds)
        if self._kept is None or now - self._kept > _KEEP_SECONDS:
            self._keep(now)
        seconds = self.times.limit_seconds(self._floor_seconds)
        if any(beat.state is not WorkerState.ABSENT and beat.step <= self._doubted_step for beat in beats):
            seconds = max(seconds, UNLEARNED_SECONDS)
        return self._limits(seconds, max(seconds, UNLEARNED_SECONDS))

    def _time(self, beats: Sequence[Beat]) -> None:
        for rank, beat in enumerate(beats):
            generation, seen = self._seen.get(rank, (-1, 0))
            steps = beat.timed_steps - (seen if generation == beat.generation else 0)
            if beat.state is WorkerState.TRAINING and beat.step_seconds > 0 and steps > 0:
                self._seen[rank] = beat.generation, beat.timed_steps
                self.times.add(beat.step_seconds, steps)
                self.times.longest_seconds = max(self.times.longest_seconds, beat.longest_step_seconds)

    def gone_over(self, step: int, now: float) -> None:
        """A rank was silent for too long after `step`."""
        self._doubted_step = max(self._doubted_step, step)
        if self._learns:
            self._keep(now)

    def _limits(self, seconds: float, long_seconds: float) -> Limits:
        return Limits(
            step_seconds=seconds, long_seconds=_PATIENCE * long_seconds, start_seconds=self._policy.start_seconds,
            by_name=self._policy.section_seconds,
        )  # fmt: skip

    def _keep(self, now: float) -> None:
        self._kept = now
        if self.times.count:
            value = {**self.times.to_json(), "doubted_step": self._doubted_step}
            with contextlib.suppress(OSError):  # a full disk: then a resumed run learns anew
                atomic.write_json(self._run.step_times, value, durable=False)

    def _read(self) -> None:
        try:
            value = atomic.read_json(self._run.step_times)
            if value is not None:
                self.times, self._doubted_step = StepTimes.from_json(value), int(value["doubted_step"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return  # it is learned anew
