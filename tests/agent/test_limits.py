"""How long a step may take, learned from steps: no false alarm within the rule, and never a late one."""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sgpu.agent.judging.failure import Failure
from sgpu.agent.judging.hangs import Hangs
from sgpu.agent.judging.limits import UNLEARNED_SECONDS, Learner, Limits, StepTimes
from sgpu.contract.beat import Section
from sgpu.contract.heartbeat import Page, Slot
from sgpu.contract.policies import RestartPolicy
from sgpu.contract.rundir import RunDir
from sgpu.testing.clock import FakeClock
from sgpu.testing.host import ScriptedHost

_TURN_SECONDS = 0.05  # the supervisor's


def _times(*seconds: float) -> StepTimes:
    times = StepTimes()
    for one in seconds:
        times.add(one)
    return times


# ---- what is learned


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=300), st.floats(0.01, 1))
def test_a_percentile_is_that_of_the_steps_or_up_to_a_tenth_more(seconds: list[float], share: float) -> None:
    nearest = sorted(seconds)[min(len(seconds) - 1, max(0, -int(-share * len(seconds) // 1) - 1))]
    found = _times(*seconds).percentile_seconds(share)
    assert nearest * (1 - 1e-9) <= found <= nearest * 1.1 * (1 + 1e-9)


@given(st.lists(st.floats(1e-3, 1e3), min_size=20, max_size=200), st.floats(0.1, 100))
def test_the_limit_is_ten_times_the_99th_percentile_and_no_less_than_the_floor(
    seconds: list[float], floor: float
) -> None:
    times = _times(*seconds)
    limit = times.limit_seconds(floor)
    p99 = times.percentile_seconds(0.99)
    assert limit >= max(floor, 10 * p99)
    assert limit <= max(floor, 10 * p99, min(UNLEARNED_SECONDS, 2 * max(seconds)))


def test_too_few_steps_say_nothing() -> None:
    assert _times(*[0.1] * 19).limit_seconds(1.0) == UNLEARNED_SECONDS
    assert _times(*[0.1] * 20).limit_seconds(0.5) == pytest.approx(1.0, rel=0.1)


def test_one_long_step_among_thousands_counts() -> None:
    """A percentile does not see it; it is no reason to kill the next one like it."""
    times = _times(*[0.1] * 5000, 90.0)
    assert times.limit_seconds(1.0) == 180.0
    times.add(4000.0)
    assert times.limit_seconds(1.0) == UNLEARNED_SECONDS, "but one alone does not switch the watch off"


def test_old_steps_fade() -> None:
    times = _times(*[5.0] * 20_000)
    assert times.limit_seconds(1.0) > 50
    for _ in range(100_000):
        times.add(0.01)
    assert times.limit_seconds(1.0) < 11
    assert len(times.to_json()["classes"]) < 5


# ---- one run


class Group:
    """Ranks under `Hangs` alone, on a clock that jumps from turn to turn."""

    def __init__(self, folder: pathlib.Path, *, ranks: int = 2, **policy: float | None) -> None:
        self.run = RunDir(folder / "run")
        if not self.run.root.exists():
            self.run.create()
            Page.create(self.run.heartbeat, ranks)
        self.page = Page(self.run.heartbeat)
        self.clock = FakeClock()
        self.host = ScriptedHost(self.run, self.page, self.clock)
        self.hangs = Hangs(self.run, self.host, self.clock, RestartPolicy(**policy))  # type: ignore[arg-type]
        self.slots = [self.page.slot(rank) for rank in range(ranks)]
        self.step = 0
        for rank, slot in enumerate(self.slots):
            self.run.attempt(0, rank).mkdir(parents=True, exist_ok=True)
            slot.start(0)
            self._stamp(slot)

    def _stamp(self, slot: Slot, *, enter: Section | None = Section.STEP) -> None:
        """The page's own clock is the machine's; here it is the test's."""
        now_ns = int(self.clock.monotonic() * 1e9)
        if enter is not None:
            slot.enter(enter)
        slot._since = now_ns
        slot._write(now_ns)

    def look(self) -> Failure | None:
        return self.hangs.look(self.page.beats(), set(range(len(self.slots))))

    def completes(self, seconds: float) -> None:
        """All ranks complete a step that takes so long; the supervisor looks once."""
        self.clock.advance(seconds)
        self.step += 1
        for slot in self.slots:
            slot.beat(self.step, step_seconds=seconds)
            self._stamp(slot)
        assert self.look() is None

    def seconds_to_alarm(self, at_most: float) -> float | None:
        """Turn by turn from here on; None: no alarm within that time."""
        began = self.clock.monotonic()
        while self.clock.monotonic() - began <= at_most:
            self.clock.advance(_TURN_SECONDS)
            if self.look() is not None:
                return self.clock.monotonic() - began
        return None

    def limits(self) -> Limits:
        return self.hangs._learner.observe(self.page.beats(), self.clock.monotonic())


@hypothesis_settings(max_examples=15, deadline=None)
@given(st.floats(0.01, 0.3), st.lists(st.floats(0.01, 1), min_size=1, max_size=6))
def test_steps_within_the_rule_raise_no_alarm_and_silence_does_in_time(typical: float, shares: Sequence[float]) -> None:
    """Whatever lies below ten times the 99th percentile passes; then silence is told half a second late at most."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGPU_HANG_FLOOR_SECONDS", "1")
        group = Group(pathlib.Path(folder))
        for _ in range(25):
            group.completes(typical)
        first = group.limits().step_seconds
        for share in shares:
            within = share * first
            assert group.seconds_to_alarm(within - 2 * _TURN_SECONDS) is None
            group.step += 1
            for slot in group.slots:
                slot.beat(group.step, step_seconds=within)
                group._stamp(slot)
        limit = group.limits().step_seconds
        waited = group.seconds_to_alarm(limit + 1)
        assert waited is not None
        assert limit < waited <= limit + 0.5


def test_a_number_is_the_limit_whatever_the_steps_take(tmp_path: pathlib.Path) -> None:
    group = Group(tmp_path, hang_seconds=4.0)
    for _ in range(100):
        group.completes(0.01)
    assert (group.limits().step_seconds, group.limits().long_seconds) == (4.0, 12.0)
    for _ in range(100):
        group.completes(3.9)
    assert group.limits().step_seconds == 4.0
    assert not group.run.step_times.exists()


def test_what_was_learned_is_kept_with_the_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGPU_HANG_FLOOR_SECONDS", "1")
    group = Group(tmp_path)
    assert group.limits().step_seconds == UNLEARNED_SECONDS
    for _ in range(30):
        group.completes(0.5)
    learned = group.limits()
    assert learned.step_seconds == pytest.approx(5.0, rel=0.1)
    assert learned.long_seconds == 3 * UNLEARNED_SECONDS
    assert Learner(group.run, RestartPolicy()).observe([], 0.0) == learned
    group.run.step_times.write_text('{"classes": 7}')
    assert Learner(group.run, RestartPolicy()).observe([], 0.0).step_seconds == UNLEARNED_SECONDS


def test_a_learned_limit_that_was_gone_over_is_doubted(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step may take ten minutes when it is done again, and what it takes then is learned."""
    monkeypatch.setenv("SGPU_HANG_FLOOR_SECONDS", "1")
    group = Group(tmp_path)
    for _ in range(300):
        group.completes(0.1)
    assert group.seconds_to_alarm(3.0) == pytest.approx(1.4, abs=0.3)
    again = Group(tmp_path)
    again.step = group.step - 5
    for _ in range(5):
        again.completes(0.1)
        assert again.limits().step_seconds == UNLEARNED_SECONDS
    again.completes(20.0)
    assert again.limits().step_seconds == 40.0


def test_ranks_that_wait_for_one_in_a_section_of_its_own_do_not_hang(tmp_path: pathlib.Path) -> None:
    group = Group(tmp_path, hang_seconds=2.0)
    group.completes(0.1)
    waiting = 'Current thread 0x1 (most recent call first):\n  File "/torch/distributed/c.py", line 1 in barrier\n'
    group._stamp(group.slots[0], enter=Section.EVALUATION)

    def signalled() -> int:
        return len([call for call in group.host.calls if call[0] == "signal"])

    def waits(seconds: float) -> None:
        until = group.clock.monotonic() + seconds
        while group.clock.monotonic() < until:
            group.clock.advance(_TURN_SECONDS)
            before = signalled()
            assert group.look() is None
            if signalled() > before:
                with group.run.stacks(0, 1).open("a") as file:
                    file.write(waiting)

    waits(5.5)
    assert signalled() == 2, "they were asked once"
    group._stamp(group.slots[0])
    waits(1.5)  # rank 1 has been silent for 7 s, but the evaluation is over for 1.5 s only
    group.completes(0.1)
    group._stamp(group.slots[0], enter=Section.EVALUATION)
    waits(2.2)
    assert group.seconds_to_alarm(6.0) is not None, "rank 0 is over its own limit"
    assert group.host.calls.count(("signal", "rank0.g0", 12)) > 1


def test_one_that_hangs_beside_such_a_section_is_found(tmp_path: pathlib.Path) -> None:
    group = Group(tmp_path, hang_seconds=2.0)
    group.completes(0.1)
    group._stamp(group.slots[0], enter=Section.EVALUATION)
    group.run.stacks(0, 1).write_text("")
    failure = None
    for _ in range(60):
        group.clock.advance(_TURN_SECONDS)
        failure = failure or group.look()
        if ("signal", "rank1.g0", 12) in group.host.calls:
            group.run.stacks(0, 1).write_text(
                'Current thread 0x1 (most recent call first):\n  File "/my/train.py", line 3 in spins\n'
            )
    assert failure is not None
    assert failure.rank == 1
    assert "in spins at /my/train.py:3" in failure.message


def test_where_the_whole_machine_stood_still_nobody_hangs(tmp_path: pathlib.Path) -> None:
    """A container that was paused: when it goes on, silence counts from then, in whatever section."""
    group = Group(tmp_path, hang_seconds=2.0)
    group.completes(0.1)
    group._stamp(group.slots[0], enter=Section.EVALUATION)
    group.clock.advance(600)
    assert group.look() is None
    assert group.seconds_to_alarm(1.9) is None
    group.completes(0.1)
    assert not [call for call in group.host.calls if call[0] == "signal"]
    waited = group.seconds_to_alarm(3.0)
    assert waited is not None
    assert 2 < waited <= 2.5
