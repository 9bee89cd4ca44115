"""Who holds the others up: windows of heartbeats, in numbers."""

from __future__ import annotations

from typing import Any

import pytest

from sgpu.agent.stragglers import Slow, Stragglers, slow_ranks
from sgpu.contract.heartbeat import Beat, Category, Section, WorkerState

_STEP_SECONDS = 0.2


def beat(step: int, data_seconds: float, **facts: Any) -> Beat:
    """A rank at `step` that has waited for data so long in all."""
    seconds = [0.0] * len(Category)
    seconds[Category.DATA] = data_seconds
    return Beat(**{
        "beat_ns": int(step * _STEP_SECONDS * 1e9), "step": step, "high_step": step, "epoch": 0, "total_steps": -1,
        "generation": 0, "pid": 1, "state": WorkerState.TRAINING, "section": Section.STEP, "section_since_ns": 0,
        "section_limit_seconds": 0.0, "category": Category.PRODUCTIVE, "ledger_since_ns": 0, "started_ns": 0,
        "seconds": tuple(seconds), **facts,
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
def test_one_window(waits: list[float], slow: dict[int, float]) -> None:
    found = slow_ranks([beat(0, 0.0) for _ in waits], [beat(20, 20 * wait) for wait in waits])
    assert {one.rank: one.ratio for one in found} == pytest.approx(slow)


class Group:
    """Three ranks whose waits are told, window by window."""

    def __init__(self) -> None:
        self.stragglers = Stragglers()
        self.step, self.waited = 0, [0.0, 0.0, 0.0]
        self.look()

    def look(self, **facts: Any) -> list[Slow]:
        return self.stragglers.look([beat(self.step, waited, **facts) for waited in self.waited])

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
