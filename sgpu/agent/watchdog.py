"""Who has stopped making progress: a pure function of heartbeats and the time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sgpu.contract.heartbeat import Beat, Section, WorkerState

# Times the hang limit. Setting up and the first step compile, download and allocate; a checkpoint waits for storage.
# After its loop a function may do what it likes, unless it says for how long.
_PATIENCE: Mapping[Section, float] = {
    Section.INIT: 3.0,
    Section.FIRST_STEP: 3.0,
    Section.CHECKPOINT: 3.0,
    Section.EVALUATION: 3.0,
    Section.USER: math.inf,
}


@dataclass(frozen=True, kw_only=True)
class Silence:
    """A rank that went over the limit of its section.

    Attributes:
        stopped: its process stands still by a signal.
        alike: ranks that are silent at the same step; which of them holds the others up, their stacks tell.
    """

    rank: int
    step: int
    section: Section
    limit_seconds: float
    silent_seconds: float
    stopped: bool = False
    alike: tuple[int, ...] = ()


def limit_seconds(beat: Beat, hang_seconds: float, start_seconds: float | None = None) -> float:
    """How long the rank may be in its section; infinite where it has promised nothing.

    A function without a loop makes no promise of steps: before its loop, a rank is watched only where its user says so
    (`start_seconds`), or where the run has trained before, so that there is a loop.
    """
    if beat.state is WorkerState.STARTING and beat.section is Section.INIT:
        if start_seconds is not None:
            return start_seconds
        return hang_seconds * _PATIENCE[Section.INIT] if beat.high_step > 0 else math.inf
    if beat.state is not WorkerState.TRAINING and not _in_first_step(beat):
        return math.inf
    if beat.section_limit_seconds > 0:
        return beat.section_limit_seconds
    return hang_seconds * _PATIENCE.get(beat.section, 1.0)


def silent(
    beats: Sequence[Beat], *, hang_seconds: float, now_ns: int, start_seconds: float | None = None
) -> Silence | None:
    """The rank to blame, or None.

    Of several over their limit, the one furthest behind is to blame: the others wait for it. That may be one that has
    not reached its loop, while the others wait in their first step. One in a declared collective is blamed last.
    """
    limits = [limit_seconds(beat, hang_seconds, start_seconds) for beat in beats]
    silences = [_silence(rank, beat, limits[rank], now_ns) for rank, beat in enumerate(beats)]
    late = [silence for silence in silences if silence.silent_seconds > silence.limit_seconds]
    if not late:
        return None
    least = min(silence.limit_seconds for silence in late)
    absent = [
        _silence(rank, beat, least, now_ns)
        for rank, beat in enumerate(beats)
        if beat.state in (WorkerState.ABSENT, WorkerState.STARTING) and not _in_first_step(beat)
    ]
    candidates = sorted(absent or late, key=_standing)
    first = candidates[0]
    alike = tuple(other.rank for other in candidates if _standing(other)[:2] == _standing(first)[:2])
    return replace(first, alike=alike)


def _in_first_step(beat: Beat) -> bool:
    return beat.state is WorkerState.STARTING and beat.section is Section.FIRST_STEP


def _silence(rank: int, beat: Beat, limit: float, now_ns: int) -> Silence:
    since_ns = max(beat.section_since_ns, beat.beat_ns if beat.section is Section.STEP else 0)
    return Silence(
        rank=rank, step=beat.step, section=beat.section, limit_seconds=limit, silent_seconds=(now_ns - since_ns) / 1e9
    )


def _standing(silence: Silence) -> tuple[bool, int, float]:
    """Sorts the one to blame first."""
    return silence.section is Section.COLLECTIVE, silence.step, -silence.silent_seconds
