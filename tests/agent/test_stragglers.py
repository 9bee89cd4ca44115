"""Who holds the others up: windows of heartbeats, in numbers."""

from __future__ import annotations

from typing import Any

import pytest

from sgpu.agent.judging.stragglers import Pace, Slow, Stragglers, slow_ranks
from sgpu.contract.heartbeat import Beat, Category, Section, WorkerState

_STEP_SECONDS = 0.2


def beat(step: int, data_seconds: float, work_seconds: float = 0.0, **facts: Any) -> Beat:
    """A rank at `step` that has waited for data, and worked, so long in all."""
    seconds = [0.0] * len(Category)
    seconds[Category.DATA] = data_seconds
    return Beat(**{
        "beat_ns": int(step * _STEP_SECONDS * 1e9), "step": step, "high_step": step, "epoch": 0, "total_steps": -1,
        "generation": 0, "pid": 1, "state": WorkerState.TRAINING, "section": Section.STEP, "section_since_ns": 0,
        "section_limit_seconds": 0.0, "category": Category.PRODUCTIVE, "ledger_since_ns": 0, "started_ns": 0,
        "seconds": tuple(seconds), "work_seconds": work_seconds, **facts,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("waits", "slow"),
    [
        ([0.1, 0.1, 0.1, 0.1], {}),
        ([0.1, 0.1, 0.12, 0.1], {}),
        ([0.1, 0.1, 0.15, 0.1], {2: 1.5}),
        ([0.05, 0.1], {1: 2.0}),
        ([0.0001, 0.0002, 0.0001], {}),  # twice as much of nothing
        ([0.02, 0.02, 0.03, 0.08], {3: 4.0}),  # 10 ms of 200 would be too little
    ],
)
@pytest.mark.parametrize("part", ["data", "compute"])
def test_one_window(part: str, waits: list[float], slow: dict[int, float]) -> None:
    even = {"step": 20, "whole": _STEP_SECONDS, "data": 0.001, "compute": 0.05}
    found = slow_ranks([Pace(**{**even, part: wait}) for wait in waits])  # type: ignore[arg-type]
    assert {one.rank: one.ratio for one in found} == pytest.approx(slow)
    assert all((one.section, one.seconds) == (part, waits[one.rank]) for one in found)


def test_where_one_rank_cannot_tell_none_is_judged_by_it() -> None:
    paces = [Pace(step=20, whole=1.0, data=0.0, compute=seconds) for seconds in (0.5, 0.0, 0.1)]
    assert slow_ranks(paces) == []


class Group:
    """Three ranks whose waits are told, window by window."""

    def __init__(self) -> None:
        self.stragglers = Stragglers()
        self.step, self.waited, self.worked = 0, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
        self.look()

    def look(self, **facts: Any) -> list[Slow]:
        both = zip(self.waited, self.worked, strict=True)
        return self.stragglers.look([beat(self.step, waited, worked, **facts) for waited, worked in both])

    def window(self, *waits: float, steps: int = 20) -> list[tuple[int, float]]:
        self.step += steps
        self.waited = [before + steps * wait for before, wait in zip(self.waited, waits, strict=True)]
        return [(one.rank, round(one.ratio, 3)) for one in self.look()]


_EVEN, _ONE_SLOW = (0.05, 0.05, 0.05), (0.05, 0.1, 0.05)


def test_three_of_five_windows_name_a_rank_once() -> None:
    group = Group()
    told = [group.window(*waits) for waits in (_ONE_SLOW, _EVEN, _ONE_SLOW, _EVEN, _ONE_SLOW, _ONE_SLOW, _ONE_SLOW)]
    assert told == [[], [], [], [], [(1, 2.0)], [], []]


def test_two_of_five_do_not() -> None:
    group = Group()
    for _ in range(4):
        assert [group.window(*waits) for waits in (_ONE_SLOW, _EVEN, _ONE_SLOW, _EVEN, _EVEN)] == [[]] * 5


def test_who_recovers_may_be_named_again() -> None:
    group = Group()
    told = [group.window(*waits) for waits in (*[_ONE_SLOW] * 3, *[_EVEN] * 6, *[_ONE_SLOW] * 3)]
    assert [bool(one) for one in told] == [False, False, True, *[False] * 8, True]


def test_a_window_is_long_enough() -> None:
    group = Group()
    for _ in range(2):
        assert group.window(*_ONE_SLOW, steps=19) == []
        assert group.window(*_ONE_SLOW, steps=1) == []
    assert group.window(*_ONE_SLOW, steps=21) == [(1, 2.0)], "the third window that is long enough"


def test_a_new_generation_begins_anew() -> None:
    group = Group()
    group.window(*_ONE_SLOW)
    group.window(*_ONE_SLOW)
    group.stragglers.begin(1)
    assert group.window(*_ONE_SLOW) == [], "beats of the former generation say nothing"
    assert group.look(generation=1) == []
    group.step += 20
    assert group.look(generation=1, state=WorkerState.STARTING) == []


def _worked(group: Group, *seconds: float) -> list[Slow]:
    """A window of steps in which each rank worked so long, seen at every step."""
    found = []
    for _ in range(20):
        group.step += 1
        group.worked = [before + own for before, own in zip(group.worked, seconds, strict=True)]
        found += group.look()
    return found


def test_one_that_works_longer_is_named_for_that() -> None:
    group = Group()
    told = [_worked(group, 0.1, 0.1, 0.15) for _ in range(4)]
    assert [bool(one) for one in told] == [False, False, True, False]
    (slow,) = told[2]
    assert (slow.rank, slow.section, round(slow.seconds, 3), round(slow.ratio, 3)) == (2, "compute", 0.15, 1.5)


def test_a_few_long_steps_are_no_slow_window() -> None:
    """Where the machine put a rank aside for a moment: the median says nothing of it."""
    group = Group()
    for _ in range(8):
        for at in range(20):
            group.step += 1
            group.worked = [
                before + own for before, own in zip(group.worked, (0.1, 0.1, 2.0 if at < 5 else 0.1), strict=True)
            ]
            assert group.look() == []


def test_one_that_is_slow_in_both_is_named_for_both() -> None:
    group = Group()
    told: list[Slow] = []
    for _ in range(3):
        for _ in range(20):
            group.step += 1
            group.waited = [before + own for before, own in zip(group.waited, (0.05, 0.05, 0.1), strict=True)]
            group.worked = [before + own for before, own in zip(group.worked, (0.05, 0.05, 0.1), strict=True)]
            told += group.look()
    assert [(one.rank, one.section) for one in told] == [(2, "data"), (2, "compute")]
