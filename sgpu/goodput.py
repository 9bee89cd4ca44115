"""How much of the machines' time becomes training: failure odds, checkpoint intervals, goodput.

Pure functions of numbers. All assume that failures are independent and memoryless (exponential), which real fleets are
not quite: a bad node fails again soon. MTBF is the mean time between failures of the whole job, counted while it
trains.

Sources:
    Young 1974, "A first order approximation to the optimum checkpoint interval".
    Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps".
    Saxena, Hukerikar, Blaz, Raj 2024, "Optimal Checkpoint Interval with Availability as an Objective Function",
    arXiv 2410.18124.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from sgpu.contract.errors import InputError

HIGHEST_GOODPUT = 0.999
"""No figure above this is shown: no model of failures is that good."""

_DAYS_A_YEAR = 365.0
_SECONDS_A_DAY = 86400.0

IntervalForm = Literal["young", "daly", "availability", "exact"]
GoodputForm = Literal["exact", "first_order"]


def failure_probability(gpus: int, days: float, yearly_probability: float = 0.01) -> float:
    """The chance that at least one of `gpus` fails within `days`.

    Args:
        gpus: how many run.
        days: for how long.
        yearly_probability: the chance that one GPU fails within a year, 0 <= p < 1. 0.01 is for GPU parts on a good
            day; Llama 3's 419 unexpected stops in 54 days on 16,384 GPUs are 0.17 failures a GPU-year from all causes.

    Returns:
        1 - (1 - p) ** (gpus * days / 365).

    Raises:
        InputError: a number is out of its range.
    """
    return -math.expm1(-expected_failures(gpus, days, yearly_probability))


def expected_failures(gpus: int, days: float, yearly_probability: float = 0.01) -> float:
    """The mean number of failures of `gpus` in `days`: -ln(1 - p) a GPU-year. Arguments as `failure_probability`."""
    _require(gpus >= 1, "gpus", "1 or more", gpus)
    _require(0 <= days < math.inf, "days", "0 or more", days)
    _require(0 <= yearly_probability < 1, "yearly_probability", "at least 0 and below 1", yearly_probability)
    return -math.log1p(-yearly_probability) * gpus * days / _DAYS_A_YEAR


def failures_band(mean: float, coverage: float = 0.9) -> tuple[int, int]:
    """The counts between which a Poisson number of failures of this mean falls with at least `coverage`.

    Each tail beyond the band holds at most (1 - coverage) / 2.
    """
    _require(0 <= mean < math.inf, "mean", "0 or more", mean)
    _require(0 < coverage < 1, "coverage", "between 0 and 1", coverage)
    tail = (1 - coverage) / 2
    if mean > 500:  # exp(-mean) leaves the range of floats; the normal approximation is good to a failure by then
        half = _normal_quantile(1 - tail) * math.sqrt(mean)
        return max(0, math.floor(mean - half)), math.ceil(mean + half)
    term = total = math.exp(-mean)
    count, low = 0, 0 if total > tail else -1
    while total < 1 - tail:
        count += 1
        term *= mean / count
        total += term
        if low < 0 and total > tail:
            low = count
    return max(low, 0), count


def mtbf_seconds(failures_a_day: float) -> float:
    """Mean time between failures of a job that fails so often a day."""
    _require(0 < failures_a_day < math.inf, "failures_a_day", "above 0", failures_a_day)
    return _SECONDS_A_DAY / failures_a_day


def optimal_interval_seconds(
    stall_seconds: float,
    mtbf_seconds: float,
    *,
    form: IntervalForm = "young",
    recovery_seconds: float = 0.0,
) -> float:
    """How long to train between two checkpoints.

    Args:
        stall_seconds: how long a checkpoint stops training (the blocked part, not the part in the background).
        mtbf_seconds: mean time between failures of the job.
        form: "young": sqrt(2 stall MTBF). "daly": his refinement for stalls that are not small against the MTBF.
            "availability": sqrt(2 stall (MTBF + recovery)), which maximises the share of time that is kept,
            interval / (interval + stall) * MTBF / (MTBF + recovery + interval / 2): availability as the objective,
            after arXiv 2410.18124. "exact": the interval at which the exact form of `expected_goodput` is largest.
        recovery_seconds: detection and restart after a failure; only "availability" depends on it.

    Returns:
        Seconds of training between two checkpoints.

    Raises:
        InputError: a number is out of its range, or the form is unknown.
    """
    _require(0 <= stall_seconds < math.inf, "stall_seconds", "seconds, 0 or more", stall_seconds)
    _require(0 < mtbf_seconds < math.inf, "mtbf_seconds", "seconds above 0", mtbf_seconds)
    _require(0 <= recovery_seconds < math.inf, "recovery_seconds", "seconds, 0 or more", recovery_seconds)
    if form == "young":
        return math.sqrt(2 * stall_seconds * mtbf_seconds)
    if form == "availability":
        return math.sqrt(2 * stall_seconds * (mtbf_seconds + recovery_seconds))
    if form == "exact":
        return mtbf_seconds * _best_share_of_mtbf(stall_seconds / mtbf_seconds)
    _require(form == "daly", "form", '"young", "daly", "availability" or "exact"', form)
    if stall_seconds >= 2 * mtbf_seconds:
        return mtbf_seconds
    ratio = stall_seconds / (2 * mtbf_seconds)
    young = math.sqrt(2 * stall_seconds * mtbf_seconds)
    return young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_seconds


def expected_goodput(
    interval_seconds: float,
    mtbf_seconds: float,
    *,
    stall_seconds: float = 0.0,
    durable_seconds: float = 0.0,
    detection_seconds: float = 0.0,
    restart_seconds: float = 0.0,
    form: GoodputForm = "exact",
) -> float:
    """The share of wall time that becomes training which is kept, at most 0.999.

    A job trains `interval_seconds`, stalls for a checkpoint that can be restored `durable_seconds` after the stall, and
    so on. At a failure it goes back to the newest durable checkpoint, after detection and restart.

    Args:
        interval_seconds: training between two checkpoints (the stall not counted).
        mtbf_seconds: mean time between failures, while training.
        stall_seconds: how long each checkpoint stops training.
        durable_seconds: from the end of the stall until that checkpoint can be restored.
        detection_seconds: from a failure until it is noticed.
        restart_seconds: from then until the first new step.
        form: "exact": interval exp(-durable / MTBF) / (exp((interval + stall) / MTBF) - 1) / (MTBF + detection +
            restart), the renewal-reward ratio of the process above. "first_order": 1 - stall / interval -
            (interval / 2 + durable + detection + restart) / MTBF, for a quick mind; wrong by percents once the
            interval exceeds 0.3 MTBF.

    Returns:
        0 to 0.999.

    Raises:
        InputError: a number is out of its range, or the form is unknown.
    """
    _require(0 < interval_seconds < math.inf, "interval_seconds", "seconds above 0", interval_seconds)
    _require(0 < mtbf_seconds < math.inf, "mtbf_seconds", "seconds above 0", mtbf_seconds)
    costs = {
        "stall_seconds": stall_seconds, "durable_seconds": durable_seconds,
        "detection_seconds": detection_seconds, "restart_seconds": restart_seconds,
    }  # fmt: skip
    for name, value in costs.items():
        _require(0 <= value < math.inf, name, "seconds, 0 or more", value)
    down = detection_seconds + restart_seconds
    if form == "first_order":
        lost = stall_seconds / interval_seconds + (interval_seconds / 2 + durable_seconds + down) / mtbf_seconds
        return _shown(1 - lost)
    _require(form == "exact", "form", '"exact" or "first_order"', form)
    cycle = (interval_seconds + stall_seconds) / mtbf_seconds
    if cycle > 700:  # exp overflows; not one checkpoint in e^700 is reached
        return 0.0
    kept = interval_seconds * math.exp(-durable_seconds / mtbf_seconds) / math.expm1(cycle)
    return _shown(kept / (mtbf_seconds + down))


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What many simulated jobs did.

    Attributes:
        goodput: mean share of wall time that was kept, at most 0.999.
        goodput_low: the 5th percentile over the jobs.
        goodput_high: the 95th percentile, at most 0.999.
        failures: mean number of failures a job.
    """

    goodput: float
    goodput_low: float
    goodput_high: float
    failures: float


def simulate(
    interval_seconds: float,
    mtbf_seconds: float,
    *,
    days: float,
    stall_seconds: float = 0.0,
    durable_seconds: float = 0.0,
    detection_seconds: float = 0.0,
    restart_seconds: float = 0.0,
    jobs: int = 200,
    seed: int = 0,
) -> Simulation:
    """Draws failures and counts what is kept: the check of `expected_goodput`, and its spread for a job's length.

    Args: as `expected_goodput`, and
        days: length of a job, wall time.
        jobs: how many are simulated.
        seed: of the draws; the same seed gives the same figures.

    Raises:
        InputError: a number is out of its range.
    """
    expected_goodput(
        interval_seconds,
        mtbf_seconds,
        stall_seconds=stall_seconds,
        durable_seconds=durable_seconds,
        detection_seconds=detection_seconds,
        restart_seconds=restart_seconds,
    )  # fmt: skip  (refuses what it would refuse)
    _require(0 < days < math.inf, "days", "above 0", days)
    _require(jobs >= 1, "jobs", "1 or more", jobs)
    draw, horizon = random.Random(seed), days * _SECONDS_A_DAY
    cycle, down = interval_seconds + stall_seconds, detection_seconds + restart_seconds
    shares, failures = [], 0
    for _ in range(jobs):
        now = kept = 0.0
        while now < horizon:
            up = draw.expovariate(1 / mtbf_seconds)
            if now + up >= horizon:  # the job ends with what it has: its last partial interval counts
                whole, rest = divmod(horizon - now, cycle)
                kept += whole * interval_seconds + min(rest, interval_seconds)
                break
            kept += max(0.0, (up - durable_seconds) // cycle) * interval_seconds
            failures += 1
            now += up + down
        shares.append(kept / horizon)
    shares.sort()
    return Simulation(
        goodput=_shown(sum(shares) / jobs),
        goodput_low=_shown(shares[int(0.05 * (jobs - 1))]),
        goodput_high=_shown(shares[math.ceil(0.95 * (jobs - 1))]),
        failures=failures / jobs,
    )


def _best_share_of_mtbf(stall: float) -> float:
    """The x at which x / (exp(x + stall) - 1) is largest: where log(1 - x) + x + stall = 0, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if math.log1p(-middle) + middle + stall > 0 else (low, middle)
    return high


def _shown(share: float) -> float:
    return min(max(share, 0.0), HIGHEST_GOODPUT)


def _normal_quantile(share: float) -> float:
    """Inverse of the normal distribution by bisection."""
    low, high = 0.0, 40.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle / math.sqrt(2)) < 2 * share - 1 else (low, middle)
    return high


def _require(ok: bool, name: str, expected: str, found: object) -> None:
    if not ok:
        raise InputError(f"{name} must be {expected}; found {found!r}")
