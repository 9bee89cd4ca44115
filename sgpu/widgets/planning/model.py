"""What a job is expected to lose to failures: a state of knobs in, figures out. Pure; the views only draw it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sgpu.contract.errors import InputError
from sgpu.goodput import (
    expected_failures,
    expected_goodput,
    failure_probability,
    failures_band,
    mtbf_seconds,
    optimal_interval_seconds,
)

COVERAGE = 0.9
FIRST_ORDER_LIMIT = 0.3
"""Share of the MTBF up to which an interval is short enough for first-order formulas."""

_DAYS_A_YEAR = 365.0
_LEAST_INTERVAL_SECONDS = 1.0
_CURVE_POINTS = 81
_CURVE_FACTOR = 30.0  # the curve goes from the best interval over this to the best interval times this
_SPREAD_POINTS = 31


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A failure rate with its source."""

    name: str
    failures_a_gpu_year: float
    source: str


PRESETS = (
    Preset(
        name="GPU parts, a good day",
        failures_a_gpu_year=-math.log1p(-0.01),
        source="1 % of GPUs fail within a year: parts alone, no network, no host, no software",
    ),
    Preset(
        name="Llama 3, all causes",
        failures_a_gpu_year=419 / 54 / 16384 * _DAYS_A_YEAR,
        source="419 unexpected stops in 54 days on 16,384 H100: The Llama 3 Herd of Models, arXiv 2407.21783, 3.3.4",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a knob may be set to."""

    low: float
    high: float
    whole: bool = False


LIMITS = {
    "gpus": Limit(low=1, high=1_000_000, whole=True),
    "days": Limit(low=0.01, high=3650),
    "failures_a_gpu_year": Limit(low=1e-5, high=1e6),
    "interval_seconds": Limit(low=_LEAST_INTERVAL_SECONDS, high=30 * 86400),
    "stall_seconds": Limit(low=0, high=86400),
    "durable_seconds": Limit(low=0, high=86400),
    "detection_seconds": Limit(low=0, high=86400),
    "restart_seconds": Limit(low=0, high=86400),
    "price": Limit(low=0, high=1e6),
}


@dataclass(frozen=True, kw_only=True)
class PlannerState:
    """What is planned.

    Attributes:
        gpus: how many run.
        days: for how long, wall time.
        failures_a_gpu_year: expected number of failures that stop the job, a GPU and year.
        interval_seconds: training between two checkpoints; None: the best.
        stall_seconds: how long a checkpoint stops training.
        durable_seconds: from the end of the stall until that checkpoint can be restored. The next one waits for it.
        detection_seconds: from a failure until it is noticed.
        restart_seconds: from then until the first new step.
        price: money a GPU hour; 0: not shown.

    Raises:
        InputError: a number is out of its range.
    """

    gpus: int = 1024
    days: float = 30.0
    failures_a_gpu_year: float = PRESETS[1].failures_a_gpu_year
    interval_seconds: float | None = None
    stall_seconds: float = 1.0
    durable_seconds: float = 60.0
    detection_seconds: float = 30.0
    restart_seconds: float = 60.0
    price: float = 0.0

    def __post_init__(self) -> None:
        for name, limit in LIMITS.items():
            check(name, getattr(self, name), limit)

    @property
    def failures_a_day(self) -> float:
        return self.gpus * self.failures_a_gpu_year / _DAYS_A_YEAR


@dataclass(frozen=True, kw_only=True)
class Knob:
    """What bettering one thing wins: `gain` in goodput, as GPU hours, as money."""

    name: str
    change: str
    gain: float
    gpu_hours: float
    money: float


@dataclass(frozen=True, kw_only=True)
class PlannerView:
    """What is to be expected. Shares are 0 to 0.999; nobody's model of failures is better than that.

    Attributes:
        chance: of at least one failure.
        failures: expected number; `failures_low` to `failures_high` in nine cases of ten.
        mtbf_seconds: of the whole job.
        interval_seconds: the one chosen, or the best.
        best_interval_seconds: where goodput is largest, not below the time until a checkpoint is durable.
        limited: whether that time is what decides the best interval.
        young_seconds, daly_seconds, availability_seconds: what the published formulas say.
        goodput: at `interval_seconds`, exact. `first_order`: the rule of thumb for it.
        lost_gpu_hours: of `gpu_hours`.
        knobs: what matters most, first.
        curve: (interval in seconds, goodput), intervals evenly spaced on a logarithmic axis.
        spread: (day, expected failures so far, low, high).
    """

    chance: float
    failures: float
    failures_low: int
    failures_high: int
    mtbf_seconds: float
    interval_seconds: float
    best_interval_seconds: float
    limited: bool
    young_seconds: float
    daly_seconds: float
    availability_seconds: float
    goodput: float
    best_goodput: float
    first_order: float
    gpu_hours: float
    lost_gpu_hours: float
    lost_money: float
    knobs: tuple[Knob, ...]
    curve: tuple[tuple[float, float], ...]
    spread: tuple[tuple[float, float, int, int], ...]


def changed(state: PlannerState, values: Mapping[str, float | None]) -> PlannerState:
    """The state with some knobs set anew; whole numbers for knobs that count.

    Raises:
        InputError: there is no such knob, or its value is out of its range.
    """
    for name in values:
        if name not in LIMITS:
            raise InputError(f"there is no knob {name!r}; there are {', '.join(LIMITS)}")
    rounded = {
        name: round(value) if LIMITS[name].whole and isinstance(value, float) and math.isfinite(value) else value
        for name, value in values.items()
    }
    return replace(state, **rounded)  # type: ignore[arg-type]


def plan(state: PlannerState) -> PlannerView:
    """The figures of a state."""
    mtbf, down = _mtbf(state), state.detection_seconds + state.restart_seconds
    best, limited = best_interval(state)
    chosen = best if state.interval_seconds is None else state.interval_seconds
    yearly = -math.expm1(-state.failures_a_gpu_year)
    failures = _expected(state, state.days)
    low, high = failures_band(failures, COVERAGE)
    share, hours = _goodput(state, chosen), state.gpus * state.days * 24
    return PlannerView(
        chance=failure_probability(state.gpus, state.days, yearly) if yearly < 1 else -math.expm1(-failures),
        failures=failures,
        failures_low=low,
        failures_high=high,
        mtbf_seconds=mtbf,
        interval_seconds=chosen,
        best_interval_seconds=best,
        limited=limited,
        young_seconds=optimal_interval_seconds(state.stall_seconds, mtbf),
        daly_seconds=optimal_interval_seconds(state.stall_seconds, mtbf, form="daly"),
        availability_seconds=optimal_interval_seconds(
            state.stall_seconds, mtbf, form="availability", recovery_seconds=down
        ),
        goodput=share,
        best_goodput=_goodput(state, best),
        first_order=_goodput(state, chosen, first_order=True),
        gpu_hours=hours,
        lost_gpu_hours=hours * (1 - share),
        lost_money=hours * (1 - share) * state.price,
        knobs=_knobs(state, share),
        curve=_curve(state, best, chosen),
        spread=_spread(state),
    )


def best_interval(state: PlannerState) -> tuple[float, bool]:
    """Seconds, and whether the time until a checkpoint is durable is what decides them: one save is in flight."""
    free = optimal_interval_seconds(state.stall_seconds, _mtbf(state), form="exact")
    least = max(state.durable_seconds, _LEAST_INTERVAL_SECONDS)
    return max(free, least), free < least


def check(name: str, value: object, limit: Limit) -> None:
    """Raises InputError unless `value` may be set."""
    if value is None and name == "interval_seconds":
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = isinstance(value, (int, float)) and number and limit.low <= value <= limit.high
    if not fits or (limit.whole and not isinstance(value, int)):
        kind = "a whole number" if limit.whole else "a number"
        raise InputError(f"{name} must be {kind} from {limit.low:,g} to {limit.high:,.0f}; found {value!r}")


def _expected(state: PlannerState, days: float) -> float:
    if state.failures_a_gpu_year < 30:  # beyond, the yearly probability is 1 to the last digit
        return expected_failures(state.gpus, days, -math.expm1(-state.failures_a_gpu_year))
    return state.failures_a_day * days


def _mtbf(state: PlannerState) -> float:
    return mtbf_seconds(state.failures_a_day)


def _goodput(state: PlannerState, interval_seconds: float, *, first_order: bool = False) -> float:
    return expected_goodput(
        interval_seconds,
        _mtbf(state),
        stall_seconds=state.stall_seconds,
        durable_seconds=state.durable_seconds,
        detection_seconds=state.detection_seconds,
        restart_seconds=state.restart_seconds,
        form="first_order" if first_order else "exact",
    )


def _knobs(state: PlannerState, now: float) -> tuple[Knob, ...]:
    """Each cost halved, one at a time; the interval follows where it was left to us."""
    halved = {
        "failures": "half as many failures",
        "stall": "a checkpoint that stops training half as long",
        "durable": "checkpoints that are durable in half the time",
        "detection": "failures noticed in half the time",
        "restart": "restarts in half the time",
    }
    others: dict[str, tuple[str, PlannerState]] = {}
    for name, words in halved.items():
        field = "failures_a_gpu_year" if name == "failures" else f"{name}_seconds"
        value = max(getattr(state, field) / 2, LIMITS[field].low)
        others[name] = (words, changed(state, {field: value}))
    if state.interval_seconds is not None:
        others["interval"] = ("the best checkpoint interval", replace(state, interval_seconds=None))
    found = []
    for name, (words, other) in others.items():
        interval = best_interval(other)[0] if other.interval_seconds is None else other.interval_seconds
        gain = max(0.0, _goodput(other, interval) - now)
        hours = gain * state.gpus * state.days * 24
        found.append(Knob(name=name, change=words, gain=gain, gpu_hours=hours, money=hours * state.price))
    return tuple(sorted(found, key=lambda knob: -knob.gain))


def _curve(state: PlannerState, best: float, chosen: float) -> tuple[tuple[float, float], ...]:
    low = max(_LEAST_INTERVAL_SECONDS, min(best / _CURVE_FACTOR, chosen / 2))
    high = max(best * _CURVE_FACTOR, chosen * 2)
    ratio = (high / low) ** (1 / (_CURVE_POINTS - 1))
    intervals = sorted({low * ratio**index for index in range(_CURVE_POINTS)} | {best, chosen})
    return tuple((interval, _goodput(state, interval)) for interval in intervals)


def _spread(state: PlannerState) -> tuple[tuple[float, float, int, int], ...]:
    found = []
    for index in range(_SPREAD_POINTS):
        day = state.days * index / (_SPREAD_POINTS - 1)
        mean = _expected(state, day)
        found.append((day, mean, *failures_band(mean, COVERAGE)))
    return tuple(found)
