"""Goodput of a job with a fault every 30 s, against the same job without: the share of its pace that is left.

Both train the same number of steps, one after the other, with a checkpoint each second or so. The faults take turns:
SIGKILL of rank 1, an exception, SIGKILL of rank 0, a hang (limit 2 s). Goal: above 95 % on a job of 20 minutes.

python -m tests.benchmarks.bench_goodput_job --minutes 20
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks import jobs, strikes
from tests.benchmarks.peers import PEERS, Started
from tests.benchmarks.table import show

_FAULTS = ("SIGKILL", "exception", "SIGKILL of rank 0", "Python loop")
_BETWEEN_SECONDS, _HANG_SECONDS, _EVERY = 30.0, 2.0, 25
_CALIBRATION_STEPS, _SLOWEST = 400, 4.0


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """`seconds` from the first step to the last one; NaN where it did not end well. `costs`: seconds of each fault."""

    seconds: float
    costs: list[float]


def _train(start: Callable[..., Started], total: int, strike_at: Sequence[int], limit_seconds: float) -> _Trained:
    with tempfile.TemporaryDirectory() as folder:
        for number, step in enumerate(strike_at):
            strikes.plan(folder, _FAULTS[number % len(_FAULTS)], step=step, number=number)
        ended_well = start(folder, total=total, every=_EVERY, hang_seconds=_HANG_SECONDS).wait(limit_seconds)
        lines, fired = jobs.lines(folder), strikes.fired(folder)
        seconds = max(line["time"] for line in lines) - min(line["time"] for line in lines)
        return _Trained(
            seconds=seconds if ended_well else math.nan,
            costs=[_cost(lines, struck["time"], struck["step"]) for struck in fired],
        )


def _cost(lines: Sequence[dict[str, Any]], struck: float, step: int) -> float:
    """Until the last rank is further than it was: what had to be done again counts too."""
    later = [line for line in lines if line["time"] > struck and line["step"] > step]
    firsts = [min((line["time"] for line in later if line["rank"] == rank), default=math.nan) for rank in (0, 1)]
    return max(firsts) - struck


def measure(minutes: float) -> dict[str, Any]:
    """One row, of sgpu. On a busy machine only what is measured within one run tells anything: `of its own time`."""
    start = PEERS["sgpu"]
    calibrated = _train(start, _CALIBRATION_STEPS, (), 60 + _CALIBRATION_STEPS)
    pace = _CALIBRATION_STEPS / calibrated.seconds
    total, between = round(minutes * 60 * pace), round(_BETWEEN_SECONDS * pace)
    faults = range(between, total - between // 2, between)
    limit = _SLOWEST * minutes * 60 + 60
    free, struck = _train(start, total, (), limit), _train(start, total, faults, limit)
    return {
        "steps": total,
        "faults": f"{len(struck.costs)} of {len(faults)}",
        "without, s": free.seconds,
        "with, s": struck.seconds,
        "a fault costs, s": sum(struck.costs) / max(1, len(struck.costs)),
        "goodput": f"{free.seconds / struck.seconds:.1%}",
        "of its own time": f"{1 - sum(struck.costs) / struck.seconds:.1%}",
    }


def run(quick: bool) -> list[dict[str, Any]]:
    return [measure(1.0 if quick else 3.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    show([measure(parser.parse_args().minutes)])


if __name__ == "__main__":
    main()
