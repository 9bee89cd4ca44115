"""A run that is asked to end: all ranks are told the same last step, and a time by which they must have reached it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sgpu.contract.heartbeat import Beat, Page, Request, WorkerState
from sgpu.contract.status import State

_CANCEL_GRACE_SECONDS = 3.0
_AHEAD_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """The end that is under way.

    Attributes:
        state: what it ends as; None: the run goes on, in another size.
        deadline: when patience ends, monotonic.
    """

    state: State | None
    deadline: float


STATES: dict[str, State | None] = {"cancel": "CANCELLED", "preempt": "PREEMPTED", "resize": None}


def ask(
    page: Page, reason: str, *, world_size: int, now: float, step_seconds: float, preempt_seconds: float
) -> Stopping:
    """Tells every rank. Those that are not in a loop yet have nothing to save, and get no time.

    Args:
        reason: "cancel", or "preempt" or "resize" (with `preempt_seconds` of grace).
        now: monotonic.
        step_seconds: what a step takes on the average; 0: not known.
    """
    grace = _CANCEL_GRACE_SECONDS if reason == "cancel" else preempt_seconds
    beats = page.beats()[:world_size]
    trains = all(beat.state is WorkerState.TRAINING for beat in beats)
    deadline = now + (grace if trains else 0.0)
    stop_step = _agreed_stop(beats, step_seconds)
    told_ns = int(deadline * 1e9) if reason == "preempt" else 0  # else the node stays, and finishes what was staged
    for rank in range(world_size):
        page.slot(rank).request(Request.SAVE_AND_STOP, stop_step=stop_step, deadline_ns=told_ns)
    return Stopping(state=STATES[reason], deadline=deadline)


def ask_no_more(page: Page) -> None:
    """For the workers that come next."""
    for rank in range(page.world_size):
        page.slot(rank).request(Request.NONE)


def _agreed_stop(beats: Sequence[Beat], step_seconds: float) -> int:
    """A step that no rank has passed when it reads this: as many steps ahead as half a second holds, at least one."""
    ahead = _AHEAD_SECONDS / step_seconds if step_seconds > 0 else 1.0
    return max(beat.step for beat in beats) + 1 + math.ceil(ahead)
