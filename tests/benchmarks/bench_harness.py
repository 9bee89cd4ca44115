"""Harness: what the loop, heartbeat and metrics add to a 20 ms step, without checkpoints, against a bare loop.

Goal: at most 1 % of the step. The step spins for exactly 20 ms, so that all else is the loop's.
"""

from __future__ import annotations

import statistics
from typing import Any

import sgpu
from tests.benchmarks.table import show

_STEP_SECONDS = 0.02


def _measure(steps: int) -> dict[str, list[float]]:
    """In a worker: seconds from the end of one step's body to the start of the next, loop by loop in turn."""
    import time
    from collections.abc import Iterable

    def between(iterable: Iterable[Any], log: Any) -> list[float]:
        found, ended = [], None
        for step in iterable:
            begun = time.perf_counter()
            if ended is not None:
                found.append(begun - ended)
            log(step)
            while time.perf_counter() - begun < _STEP_SECONDS:
                pass
            ended = time.perf_counter()
        return found

    results: dict[str, list[float]] = {"bare": [], "harness": []}
    quarter = steps // 4
    loop = sgpu.TrainLoop(
        max_steps=steps, extra={"nothing": _Nothing()}, checkpoints=sgpu.CheckpointPolicy(every_steps=10**9)
    )
    inside = iter(loop)
    for _ in range(4):
        results["bare"] += between(range(quarter), lambda _step: None)
        results["harness"] += between(
            (next(inside) for _ in range(quarter)), lambda step: loop.log(loss=1.0 / (step + 1), accuracy=0.5)
        )
    for _ in inside:
        pass
    return results


class _Nothing:
    def state_dict(self) -> dict[str, int]:
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def run(quick: bool) -> list[dict[str, Any]]:
    steps = 200 if quick else 2000
    (found,) = sgpu.distributed(gpus=1, name="bench-harness")(_measure).submit(steps).result()
    rows = []
    for name, seconds in found.items():
        ordered = sorted(seconds)
        mean = statistics.fmean(ordered)
        rows.append(
            {
                "loop": name,
                "mean us": mean * 1e6,
                "median us": statistics.median(ordered) * 1e6,
                "p99 us": ordered[int(0.99 * len(ordered))] * 1e6,
                "mean / 20 ms step": f"{mean / _STEP_SECONDS:.3%}",
            }
        )
    return rows


if __name__ == "__main__":
    show(run(quick=False))
