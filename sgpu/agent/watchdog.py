"""Who has stopped making progress: a pure function of heartbeats and the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sgpu.contract.heartbeat import Beat, Section, WorkerState

# Times the hang limit. Setting up and the first step compile, download and allocate; a checkpoint waits for storage.
_PATIENCE: Mapping[Section, float] = {
    Section.INIT: 3.0,
    Section.FIRST_STEP: 3.0,
    Section.CHECKPOINT: 3.0,
    Section.EVALUATION: 3.0,
}


@dataclass(frozen=True, kw_only=True)
class Silence:
    """A rank that went over the limit of its section."""

    rank: int
    step: int
    section: Section
    limit_seconds: float
    silent_seconds: float


def limit_seconds(beat: Beat, hang_seconds: float) -> float:
    if beat.section_limit_seconds > 0:
        return beat.section_limit_seconds
    return hang_seconds * _PATIENCE.get(beat.section, 1.0)


def silent(beats: Sequence[Beat], *, hang_seconds: float, now_ns: int) -> Silence | None:
    """The rank to blame, or None.

    Only ranks that train are watched: a function without a loop makes no promise of steps. Of several over their
    limit, the one furthest behind is to blame: the others wait for it.
    """
    late = []
    for rank, beat in enumerate(beats):
        if beat.state is not WorkerState.TRAINING:
            continue
        limit = limit_seconds(beat, hang_seconds)
        since_ns = max(beat.section_since_ns, beat.beat_ns if beat.section is Section.STEP else 0)
        waited = (now_ns - since_ns) / 1e9
        if waited > limit:
            late.append((beat.step, beat.beat_ns, rank, limit, waited))
    if not late:
        return None
    step, _, rank, limit, waited = min(late)
    return Silence(rank=rank, step=step, section=beats[rank].section, limit_seconds=limit, silent_seconds=waited)
