"""Metrics that follow from what happened: one event in, points out."""

from __future__ import annotations

from typing import Any

from sgpu.metrics import names
from sgpu.metrics.progress import Point

_BY_STEP: dict[str, dict[str, str]] = {
    "checkpoint_committed": {
        "checkpoint_blocked_seconds": "blocked_seconds",
        "checkpoint_save_seconds": "save_seconds",
        "checkpoint_size_bytes": "size_bytes",
    },
}
_BY_GENERATION: dict[str, dict[str, str]] = {
    "generation_started": {"restarts": "generation"},
    "restored": {"restore_seconds": "seconds"},
    "resumed": {"recovery_seconds": "seconds", "recomputed_steps": "recomputed_steps"},
}


def points_of(event: dict[str, Any]) -> list[Point]:
    """Points of one event; none where it has no figures.

    What happens once a generation has the generation as its step: two restarts from the same step stay two points.
    """
    kind, time_seconds, rank = event.get("kind"), event.get("time"), event.get("rank")
    by_step = _BY_STEP.get(str(kind))
    wanted = by_step or _BY_GENERATION.get(str(kind), {})
    step = event.get("step" if by_step else "generation")
    if not isinstance(time_seconds, (int, float)) or not isinstance(step, int):
        return []
    return [
        Point(
            key=names.for_rank(rank if isinstance(rank, int) else 0, name),
            value=float(event[fact]),
            step=step,
            time_seconds=float(time_seconds),
        )
        for name, fact in wanted.items()
        if isinstance(event.get(fact), (int, float))
    ]
