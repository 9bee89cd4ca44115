"""Who has stopped making progress: the table."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from sgpu.agent.judging.limits import Limits
from sgpu.agent.judging.watchdog import silent
from sgpu.contract.heartbeat import Beat, Category, Section, WorkerState

_NOW = 10_000
_LIMITS = Limits(step_seconds=10, long_seconds=30)


def _beat(*, step: int = 5, ago: float = 0.0, section_ago: float | None = None, **facts: Any) -> Beat:
    """A rank whose last beat was `ago` seconds before now, in its section for `section_ago`."""
    values: dict[str, Any] = {
        "beat_ns": int((_NOW - ago) * 1e9), "step": step, "high_step": step, "epoch": 0, "total_steps": -1,
        "generation": 0, "pid": 1, "state": WorkerState.TRAINING, "section": Section.STEP,
        "section_since_ns": int((_NOW - (ago if section_ago is None else section_ago)) * 1e9),
        "section_limit_seconds": 0.0, "category": Category.PRODUCTIVE, "ledger_since_ns": 0, "started_ns": 0,
        "seconds": (0.0,) * len(Category),
    }  # fmt: skip
    return Beat(**{**values, **facts})


def _blamed(*beats: Beat) -> int | None:
    found = silent(beats, limits=_LIMITS, now_ns=int(_NOW * 1e9))
    return found.rank if found is not None else None


@pytest.mark.parametrize(
    ("beat", "limit"),
    [
        (_beat(), 10.0),
        (_beat(section=Section.DATA), 10.0),
        (_beat(section=Section.COLLECTIVE), 10.0),
        (_beat(section=Section.USER), math.inf),
        (_beat(section=Section.FIRST_STEP), 30.0),
        (_beat(section=Section.CHECKPOINT), 30.0),
        (_beat(section=Section.EVALUATION), 30.0),
        (_beat(section=Section.INIT), 30.0),
        (_beat(section=Section.USER, section_name="export"), 30.0),
        (_beat(section=Section.DATA, section_name="epoch_start"), 30.0),
        (_beat(section=Section.USER, section_name="export", section_limit_seconds=7.0), 7.0),
        (_beat(section=Section.USER, section_name="export", state=WorkerState.STARTING), 30.0),
        (_beat(section=Section.EVALUATION, state=WorkerState.STARTING, section_limit_seconds=90.0), 90.0),
        (_beat(section=Section.STEP, state=WorkerState.STARTING), math.inf),
        (_beat(section_limit_seconds=120.0), 120.0),
        (_beat(section=Section.CHECKPOINT, section_limit_seconds=5.0), 5.0),
    ],
)
def test_limits(beat: Beat, limit: float) -> None:
    assert _LIMITS.of(beat) == limit


@pytest.mark.parametrize(
    ("beat", "limit"),
    [
        (_beat(section=Section.FIRST_STEP), 70.0),
        (_beat(section=Section.FIRST_STEP, state=WorkerState.STARTING), 70.0),
        (_beat(section=Section.DATA), 4.0),
        (_beat(section=Section.USER, section_name="export"), 99.0),
        (_beat(section=Section.USER, section_name="export", section_limit_seconds=5.0), 5.0),  # the call knows best
        (_beat(section=Section.EVALUATION), 30.0),
        (_beat(), 10.0),
    ],
)
def test_limits_of_the_users_own(beat: Beat, limit: float) -> None:
    assert replace(_LIMITS, by_name={"first_step": 70.0, "data": 4.0, "export": 99.0}).of(beat) == limit


@pytest.mark.parametrize(
    ("beats", "blamed"),
    [
        ([_beat(ago=9)], None),
        ([_beat(ago=11)], 0),
        ([_beat(ago=1, section_ago=500)], None),  # steps follow one another without a new section
        ([_beat(ago=500, section_ago=1)], None),  # a declared section has begun since
        ([_beat(ago=29, section=Section.FIRST_STEP)], None),
        ([_beat(ago=31, section=Section.FIRST_STEP)], 0),
        ([_beat(ago=29, section=Section.CHECKPOINT)], None),
        ([_beat(ago=31, section=Section.CHECKPOINT)], 0),
        ([_beat(ago=0, section_ago=11, section=Section.DATA)], 0),
        ([_beat(ago=100, section_limit_seconds=101.0)], None),
        ([_beat(ago=100, section_limit_seconds=99.0)], 0),
        ([_beat(ago=500, state=WorkerState.FINISHED)], None),
        ([_beat(ago=500, state=WorkerState.ABSENT)], None),
        ([_beat(ago=31, step=0, state=WorkerState.STARTING, section=Section.FIRST_STEP)], 0),
        ([_beat(ago=29, step=0, state=WorkerState.STARTING, section=Section.FIRST_STEP)], None),
    ],
)
def test_one_rank(beats: list[Beat], blamed: int | None) -> None:
    assert _blamed(*beats) == blamed


def _setting_up(ago: float, **facts: Any) -> Beat:
    return _beat(step=0, ago=ago, section=Section.INIT, state=WorkerState.STARTING, **facts)


@pytest.mark.parametrize(
    ("beats", "start_seconds", "blamed"),
    [
        ([_setting_up(5000)], None, None),  # no loop, no promise
        ([_setting_up(4)], 5.0, None),
        ([_setting_up(6)], 5.0, 0),
        ([_setting_up(29, high_step=7)], None, None),  # it has trained before: there is a loop
        ([_setting_up(31, high_step=7)], None, 0),
        ([_setting_up(31, high_step=7)], 40.0, None),
        ([_setting_up(6), _setting_up(7)], 5.0, 1),
        # Rank 0 is over its own limit, because rank 1 has not come yet, though that is within its.
        ([_beat(step=0, ago=31, section=Section.FIRST_STEP, state=WorkerState.STARTING), _setting_up(20)], 60.0, 1),
        ([_beat(ago=5), _setting_up(6)], 5.0, 1),
    ],
)
def test_before_the_loop(beats: list[Beat], start_seconds: float | None, blamed: int | None) -> None:
    found = silent(beats, limits=replace(_LIMITS, start_seconds=start_seconds), now_ns=int(_NOW * 1e9))
    assert (found.rank if found else None) == blamed


@pytest.mark.parametrize(
    ("beats", "blamed"),
    [
        ([_beat(step=6, ago=12), _beat(step=5, ago=11)], 1),  # the one behind holds the other up
        ([_beat(step=5, ago=11), _beat(step=5, ago=13)], 1),  # equal steps: the one that is silent for longer
        ([_beat(step=6, ago=12, section=Section.COLLECTIVE), _beat(step=6, ago=11)], 1),  # waits for the other
        ([_beat(ago=1), _beat(ago=11)], 1),
        # Rank 1 has not even reached its loop; the others wait for it in their first step.
        ([_beat(step=0, ago=31, section=Section.FIRST_STEP, state=WorkerState.STARTING),
          _beat(step=0, ago=40, section=Section.INIT, state=WorkerState.STARTING)], 1),
        ([_beat(step=7, ago=11), _beat(step=7, ago=3, state=WorkerState.FINISHED)], 0),
    ],
)  # fmt: skip
def test_whom_to_blame(beats: list[Beat], blamed: int) -> None:
    assert _blamed(*beats) == blamed


def test_what_is_told() -> None:
    found = silent([_beat(), _beat(step=3, ago=12.5)], limits=_LIMITS, now_ns=int(_NOW * 1e9))
    assert found is not None
    assert (found.rank, found.step, found.section, found.limit_seconds) == (1, 3, Section.STEP, 10)
    assert found.silent_seconds == pytest.approx(12.5)


def _found(*beats: Beat, **options: Any) -> Any:
    return silent(beats, limits=_LIMITS, now_ns=int(_NOW * 1e9), **options)


def test_who_may_hold_the_others_up_is_told_the_likeliest_first() -> None:
    beats = [_beat(step=4, ago=12), _beat(step=4, ago=13), _beat(step=5, ago=11), _beat(step=4, ago=1)]
    assert _found(*beats).suspects == (1, 0, 2)
    waiting, ahead = _beat(step=4, ago=11), _beat(step=5, ago=9)
    assert _found(waiting, ahead).suspects == (0, 1), "it is silent a little shorter, since the other waits for it"
    assert _found(waiting, _beat(step=5, ago=9, section=Section.COLLECTIVE)).suspects == (0, 1)
    assert _found(waiting, replace(ahead, state=WorkerState.FINISHED)).suspects == (0,)


@pytest.mark.parametrize(
    ("beats", "waits_for"),
    [
        ([_beat(ago=11), _beat(ago=11, section=Section.EVALUATION)], 1),
        ([_beat(ago=11), _beat(ago=29, section=Section.CHECKPOINT)], 1),
        ([_beat(ago=11), _beat(ago=999, section=Section.USER, section_name="export", section_limit_seconds=1000.0)], 1),
        ([_beat(ago=11), _beat(ago=29, section=Section.DATA, section_name="epoch_start")], 1),
        ([_beat(ago=31, section=Section.CHECKPOINT), _beat(ago=11)], None),  # it is over its own limit
        ([_beat(ago=11), _beat(ago=11, section=Section.USER)], None),  # after its loop, it has declared nothing
        ([_beat(ago=11), _beat(ago=11, section=Section.EVALUATION, state=WorkerState.FINISHED)], None),
        ([_beat(ago=11), _beat(ago=2)], None),
        # Its own section has no more to do with the other's than its own limit says.
        ([_beat(ago=31, section=Section.EVALUATION), _beat(ago=1, section=Section.CHECKPOINT)], None),
    ],
)
def test_one_in_a_section_of_its_own_may_be_what_the_others_wait_for(beats: list[Beat], waits_for: int | None) -> None:
    assert _found(*beats).waits_for == waits_for


def test_after_such_a_wait_silence_counts_from_its_end() -> None:
    beats = [_beat(ago=100), _beat(ago=3)]
    assert _found(*beats).rank == 0
    assert _found(*beats, excused_ns=int((_NOW - 9) * 1e9)) is None
    assert _found(*beats, excused_ns=int((_NOW - 11) * 1e9)).silent_seconds == pytest.approx(11)
    declared = _beat(ago=100, section=Section.CHECKPOINT)
    assert _found(declared, excused_ns=int((_NOW - 9) * 1e9)).rank == 0, "its section is its own"
