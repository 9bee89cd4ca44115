"""Who has stopped making progress: a pure function of heartbeats and the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sgpu.agent.judging.limits import Limits, name_of
from sgpu.contract.beat import Beat, Section, WorkerState

_WORKING = (WorkerState.STARTING, WorkerState.TRAINING)
_DECLARED = (Section.CHECKPOINT, Section.EVALUATION)
_SUSPECT_SHARE = 0.5  # of the least limit that was gone over: one that waits for another is silent a little shorter


@dataclass(frozen=True, kw_only=True)
class Silence:
    """A rank that went over the limit of its section.

    Attributes:
        name: of its section; declared: it has a limit of its own that is not a step's, and others may wait for it.
        suspects: ranks of which one holds the others up, the likeliest first; which of them, their stacks tell.
        waits_for: a rank that is within the limit of a section that it has declared; who waits for it does not hang.
    """

    rank: int
    step: int
    section: Section
    name: str
    limit_seconds: float
    silent_seconds: float
    declared: bool = False
    suspects: tuple[int, ...] = ()
    waits_for: int | None = None


def silent(
    beats: Sequence[Beat], *, limits: Limits, now_ns: int, excused_ns: int = 0, thawed_ns: int = 0
) -> Silence | None:
    """The rank to blame as far as heartbeats tell, or None.

    Of several over their limit, the one furthest behind is to blame: the others wait for it. That may be one that has
    not reached its loop, while the others wait in their first step. One in a collective is blamed last.

    Args:
        limits: of each section.
        excused_ns: until then, ranks waited for one that was in a section it had declared.
        thawed_ns: until then, this whole machine stood still.
    """
    allowed = [limits.of(beat) for beat in beats]
    silences = [_silence(rank, beat, allowed[rank], now_ns, excused_ns, thawed_ns) for rank, beat in enumerate(beats)]
    late = [silence for silence in silences if silence.silent_seconds > silence.limit_seconds]
    late_ranks = {silence.rank for silence in late}
    if not late:
        return None
    least = min(silence.limit_seconds for silence in late)
    absent = [
        _silence(rank, beat, least, now_ns, 0, thawed_ns)
        for rank, beat in enumerate(beats)
        if beat.state in (WorkerState.ABSENT, WorkerState.STARTING) and not _in_first_step(beat)
    ]
    first = min(absent or late, key=_standing)
    near = [
        silence
        for silence in silences
        if beats[silence.rank].state in _WORKING and silence.silent_seconds > _SUSPECT_SHARE * least
    ]
    suspects = sorted(absent or [one for one in near if one.rank in late_ranks or not one.declared], key=_standing)
    busy = [
        one.rank
        for one in silences
        if one.rank not in late_ranks and one.declared and beats[one.rank].state in _WORKING
    ]
    return replace(
        first,
        suspects=tuple(one.rank for one in suspects),
        waits_for=busy[0] if busy and not first.declared else None,
    )


def _in_first_step(beat: Beat) -> bool:
    return beat.state is WorkerState.STARTING and beat.section is Section.FIRST_STEP


def _silence(rank: int, beat: Beat, limit: float, now_ns: int, excused_ns: int, thawed_ns: int) -> Silence:
    since_ns = max(beat.section_since_ns, beat.beat_ns if beat.section is Section.STEP else 0, thawed_ns)
    declared = beat.section in _DECLARED or (beat.section in (Section.USER, Section.DATA) and beat.section_name != "")
    if not declared:
        since_ns = max(since_ns, excused_ns)
    return Silence(
        rank=rank, step=beat.step, section=beat.section, name=name_of(beat), limit_seconds=limit,
        silent_seconds=(now_ns - since_ns) / 1e9, declared=declared,
    )  # fmt: skip


def _standing(silence: Silence) -> tuple[bool, int, float]:
    """Sorts the one to blame first."""
    return silence.section is Section.COLLECTIVE, silence.step, -silence.silent_seconds
