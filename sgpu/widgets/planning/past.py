"""What this machine's past runs say about failures, checkpoints and restarts. Reads event files, writes nothing."""

from __future__ import annotations

import pathlib
import statistics
from dataclasses import dataclass, field

from sgpu.contract import records
from sgpu.contract.errors import SgpuError
from sgpu.contract.rundir import RunDir, all_runs
from sgpu.contract.spec import RunSpec, read_spec
from sgpu.widgets.planning.model import LIMITS, PlannerState, Preset, changed
from sgpu.widgets.words import plural, seconds

MAX_RUNS = 200
_NONE_SEEN = 3.0  # no failure in T: below 3 / T with 95 % (the rule of three)
_SECONDS_A_YEAR = 365 * 86400.0
_BYTES_A_RUN = 16 * 2**20
_MACHINE_CAUSES = ("SIG", "signal", "no step")  # nobody's code ends like this on purpose


@dataclass(frozen=True, kw_only=True)
class PastRuns:
    """What was measured. Times are medians, None where nothing was seen.

    Attributes:
        failures: that a restart got over, and ends by a signal or silence. An exception that ended a run is a bug.
        gpu_seconds: that these runs ran, all workers together.
    """

    runs: int
    failures: int
    gpu_seconds: float
    stall_seconds: float | None = None
    durable_seconds: float | None = None
    restart_seconds: float | None = None

    def preset(self) -> Preset | None:
        """The failure rate; None where too little ran to say anything."""
        if self.gpu_seconds <= 0:
            return None
        limit = LIMITS["failures_a_gpu_year"]
        found = (self.failures or _NONE_SEEN) / self.gpu_seconds * _SECONDS_A_YEAR
        told = plural(self.failures, "failure") if self.failures else "no failure (with 95 %, at most this rate)"
        return Preset(
            name="this machine's past runs",
            failures_a_gpu_year=min(max(found, limit.low), limit.high),
            source=f"{told} in {plural(self.runs, 'run')}, {seconds(self.gpu_seconds)} of one worker's time in all",
        )

    def times(self, state: PlannerState) -> PlannerState:
        """The state with the measured times in it. A restart as it is measured holds its detection."""
        measured = {
            "stall_seconds": self.stall_seconds, "durable_seconds": self.durable_seconds,
            "restart_seconds": self.restart_seconds,
            "detection_seconds": None if self.restart_seconds is None else 0.0,
        }  # fmt: skip
        return changed(
            state, {name: min(value, LIMITS[name].high) for name, value in measured.items() if value is not None}
        )


@dataclass(kw_only=True)
class _Sums:
    runs: int = 0
    failures: int = 0
    gpu_seconds: float = 0.0
    stalls: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    restarts: list[float] = field(default_factory=list)


def measure(home: pathlib.Path) -> PastRuns:
    """Reads the newest runs of a home."""
    sums = _Sums()
    for run in all_runs(home)[:MAX_RUNS]:
        try:
            spec = read_spec(run)
            if run.events.stat().st_size > _BYTES_A_RUN:
                continue
        except (SgpuError, OSError, TypeError, KeyError):  # another version's, or being removed
            continue
        _add(sums, spec, run)
    return PastRuns(
        runs=sums.runs,
        failures=sums.failures,
        gpu_seconds=sums.gpu_seconds,
        stall_seconds=statistics.median(sums.stalls) if sums.stalls else None,
        durable_seconds=statistics.median(sums.durable) if sums.durable else None,
        restart_seconds=statistics.median(sums.restarts) if sums.restarts else None,
    )


def _add(sums: _Sums, spec: RunSpec, run: RunDir) -> None:
    times, pending = [], False
    for record in records.read_all(run.events):
        kind, moment = record.get("kind"), _number(record.get("time"))
        if moment is not None:
            times.append(moment)
        if kind == "failure":
            sums.failures += pending
            pending = str(record.get("cause")).startswith(_MACHINE_CAUSES)
        elif kind == "restarting":  # whatever it was, a new start got over it
            sums.failures += 1
            pending = False
        elif kind == "checkpoint_committed":
            blocked, whole = _number(record.get("blocked_seconds")), _number(record.get("save_seconds"))
            if blocked is not None and whole is not None:
                sums.stalls.append(blocked)
                sums.durable.append(max(0.0, whole - blocked))
        elif kind == "resumed" and (took := _number(record.get("seconds"))) is not None:
            sums.restarts.append(took)
    sums.failures += pending
    if times:
        sums.runs += 1
        sums.gpu_seconds += max(0.0, max(times) - min(times)) * spec.world_size


def _number(value: object) -> float | None:
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")
    return float(value) if fits else None  # type: ignore[arg-type]
