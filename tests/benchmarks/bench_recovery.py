"""Recovery: seconds from a fault to the first step that the last needed rank trains afterwards; a schedule of faults.

Goals on an idle machine: exception 0.5 s, SIGKILL 1.0 s (of rank 0 too), a hang its limit + 0.5 s, a node 4 s; never an
extra attempt. All train the same two ranks, checkpoint every 5 steps of 20 ms, and meet the same fault by themselves
(strikes.py), one way after the other within each round. A round that does not come back in time, or that took more than
one restart, is counted as not clean. A node is lost with its agent and all that runs there. sgpu starts another agent
by itself; torchrun has nobody who does, so that the benchmark starts one at once.

python -m tests.benchmarks.bench_recovery --rounds 20 --faults SIGKILL exception --ways sgpu torchrun
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.benchmarks import jobs, peers, peers_apart, strikes
from tests.benchmarks.peers import NODE_PEERS, Started
from tests.benchmarks.table import show

_STRIKE_AFTER_STEP, _TOTAL, _EVERY = 12, 40, 5
_HANG_SECONDS = 2.0
_GROUP_SECONDS = 10.0  # torchrun's ranks notice a hang by their group's time-out, which must hold a checkpoint too
_START_SECONDS, _ROUND_SECONDS, _NODE_SECONDS = 60.0, 20.0, 60.0  # a start; all from a fault to the job's end
_SCHEDULE = ("SIGKILL", "exception", "SIGKILL of rank 0", "exception")
_SCHEDULE_STEPS = 200  # between two of its faults
FAULTS = (*strikes.FAULTS, "node lost")
PEERS = {**peers.PEERS, **peers_apart.here()}


def recover(fault: str, start: Callable[..., Started], *, hang_seconds: float | None = None) -> dict[str, Any]:
    """One round: seconds (NaN: it did not come back), and whether one restart was enough and the job ended well."""
    limit = {"hang_seconds": hang_seconds} if hang_seconds is not None else {}
    with tempfile.TemporaryDirectory() as folder:
        if fault != "node lost":
            strikes.plan(folder, fault, step=_STRIKE_AFTER_STEP)
        started = start(folder, total=_TOTAL, every=_EVERY, **limit)
        try:
            struck = _strike(fault, folder, started)
        except TimeoutError:
            started.wait(0.0)
            return {"seconds": math.nan, "clean": False}
        ended_well = started.wait(_NODE_SECONDS if fault == "node lost" else _ROUND_SECONDS)
        seconds = _seconds_to_step(folder, struck, started.resumes(fault))
        return {"seconds": seconds, "clean": ended_well and started.restarts() == 1 and not math.isnan(seconds)}


def _strike(fault: str, folder: str, started: Started) -> float:
    """When it happened, seconds since 1970."""

    def reached() -> bool:
        return any(line["rank"] == 1 and line["step"] >= _STRIKE_AFTER_STEP for line in jobs.lines(folder))

    if fault != "node lost":
        _until(lambda: bool(strikes.fired(folder)))
        return float(strikes.fired(folder)[0]["time"])
    _until(reached)
    struck = time.time()
    started.lose_node()
    return struck


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job did not get that far within {_START_SECONDS:g} s")
        time.sleep(0.005)


def _seconds_to_step(folder: str, struck: float, resumes: int) -> float:
    """To the first step of the last rank in its next life; NaN where less than `resumes` ranks have one."""
    lines = sorted(jobs.lines(folder), key=lambda line: line["time"])
    before = {line["life"] for line in lines if line["time"] <= struck + 1e-3}
    firsts: dict[int, float] = {}
    for line in lines:
        if line["life"] not in before:
            firsts.setdefault(line["rank"], line["time"])
    return float(max(firsts.values()) - struck) if len(firsts) >= resumes else math.nan


def schedule(start: Callable[..., Started], faults: Sequence[str]) -> float:
    """Seconds from the call until all steps are done, with each fault after so many further steps; NaN: never."""
    total = _SCHEDULE_STEPS * (len(_SCHEDULE) + 1)
    with tempfile.TemporaryDirectory() as folder:
        for number, fault in enumerate(faults):
            strikes.plan(folder, fault, step=_SCHEDULE_STEPS * (number + 1), number=number)
        started = start(folder, total=total, every=_EVERY)
        ended_well = started.wait(_ROUND_SECONDS * (len(_SCHEDULE) + 1))
        if not ended_well or len(strikes.fired(folder)) != len(faults):
            return math.nan
        return max(line["time"] for line in jobs.lines(folder)) - started.began


def rows_of(
    rounds: int, faults: Sequence[str], ways: Sequence[str] | None, *, minutes: float = math.inf
) -> list[dict[str, Any]]:
    """Round by round, each fault and way in turn; after so many minutes no round is begun."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    until = time.monotonic() + 60 * minutes
    for _ in range(rounds):
        if time.monotonic() > until:
            break
        for fault in faults:
            ways_here = NODE_PEERS if fault == "node lost" else PEERS
            for way in ways_here:
                if ways and way not in ways:
                    continue
                limit = None
                if fault in strikes.HANGS:
                    limit = _GROUP_SECONDS if way.startswith("torchrun") else _HANG_SECONDS
                result = recover(fault, ways_here[way], hang_seconds=limit)
                told = f"{result['seconds']:.2f} s, {'clean' if result['clean'] else 'not clean'}"
                print(f"{fault}, {way}: {told}", file=sys.stderr, flush=True)
                found.setdefault((fault, way), []).append({**result, "limit": limit})
    return [_row(fault, way, results) for (fault, way), results in found.items()]


def _row(fault: str, way: str, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = sorted(result["seconds"] for result in results if result["clean"]) or [math.nan]
    return {
        "fault": fault,
        "way": way,
        "limit s": results[0]["limit"],
        "median s": statistics.median(seconds),
        "p95 s": seconds[math.ceil(0.95 * len(seconds)) - 1],
        "min s": seconds[0],
        "clean": f"{sum(result['clean'] for result in results)} of {len(results)}",
        "did not come back": sum(math.isnan(result["seconds"]) for result in results),
    }


def schedule_rows(rounds: int, ways: Sequence[str] | None) -> list[dict[str, Any]]:
    """Each way with the faults and without, in turn."""
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for way, start in PEERS.items():
            if not ways or way in ways:
                found.setdefault(way, []).append((schedule(start, ()), schedule(start, _SCHEDULE)))
    return [
        {
            "way": way,
            f"{_SCHEDULE_STEPS * (len(_SCHEDULE) + 1)} steps, s": statistics.median(free for free, _ in pairs),
            f"with {len(_SCHEDULE)} faults, s": statistics.median(struck for _, struck in pairs),
            "goodput of the fault-free": statistics.median(free / struck for free, struck in pairs),
            "not ended": sum(math.isnan(struck) for _, struck in pairs),
        }
        for way, pairs in found.items()
    ]


def run(quick: bool) -> list[dict[str, Any]]:
    return rows_of(1 if quick else 10, ("SIGKILL", "node lost") if quick else FAULTS, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=FAULTS)
    parser.add_argument("--ways", nargs="*", choices=sorted({*PEERS, *NODE_PEERS}), help="none: all that are here")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after so many, no round is begun")
    parser.add_argument("--schedule", action="store_true", help="seconds for many steps with faults in between instead")
    asked = parser.parse_args()
    if asked.schedule:
        show(schedule_rows(asked.rounds, asked.ways))
    else:
        show(rows_of(asked.rounds, asked.faults, asked.ways, minutes=asked.minutes))


if __name__ == "__main__":
    main()
