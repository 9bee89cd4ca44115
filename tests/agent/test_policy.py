"""Restart or stop: the table."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sgpu.agent.judging.failure import Failure
from sgpu.agent.judging.policy import Decision, History, Past, decide
from sgpu.contract.policies import RestartPolicy


def _failure(kind: str = "signal", step: int = 10, cause: str = "SIGKILL, signal 9", **facts: Any) -> Failure:
    rank = facts.pop("rank", 1)
    message = facts.pop("message", f"rank {rank} ended without a result ({cause})")
    return Failure(kind=kind, rank=rank, generation=0, step=step, cause=cause, message=message, time=1.0, **facts)  # type: ignore[arg-type]


_KILLED = _failure()
_RAISED = _failure("exception", cause="ValueError", message="boom 42")
_HUNG = _failure("hang", cause="no step for 600 s")
_LOST = _failure("infrastructure", cause="the store ended")


def _past(*failures: Failure, committed: int = 5) -> list[Past]:
    return [Past(failure=failure, committed_step=committed) for failure in failures]


def _decide(failure: Failure, history: list[Past] | None = None, committed: int = 5, **policy: Any) -> Decision:
    return decide(failure, history or [], RestartPolicy(**policy), committed_step=committed)


@pytest.mark.parametrize("failure", [_KILLED, _RAISED, _HUNG, _LOST], ids=lambda failure: failure.kind)
def test_a_first_failure_is_survived_at_once(failure: Failure) -> None:
    decision = _decide(failure)
    assert (decision.action, decision.wait_seconds) == ("restart", 0.0)


@pytest.mark.parametrize("failure", [_KILLED, _RAISED, _HUNG, _LOST], ids=lambda failure: failure.kind)
def test_restarts_0_means_none(failure: Failure) -> None:
    decision = _decide(failure, max_restarts=0)
    assert (decision.action, decision.error, decision.reason) == ("stop", "failure", "restarts are switched off")


def test_what_cannot_heal_stops_at_once() -> None:
    decision = _decide(dataclasses.replace(_RAISED, cause="ImportError", unrecoverable=True))
    assert (decision.action, decision.error) == ("stop", "failure")
    assert "ImportError would happen again" in decision.reason


@pytest.mark.parametrize(
    ("failure", "action"),
    [
        (_failure("exception", step=0, cause="ValueError"), "stop"),
        (_failure("exit", step=0, cause="exit code 3"), "stop"),
        (_failure("signal", step=0, cause="SIGSEGV, signal 11"), "stop"),
        (_failure("signal", step=0, cause="SIGKILL, signal 9"), "restart"),  # somebody else's doing: memory, a person
        (_failure("exception", step=0, cause="RuntimeError", collateral=True), "restart"),
        (_failure("hang", step=0, cause="no step for 600 s"), "restart"),
        (_failure("infrastructure", step=0, cause="the store ended"), "restart"),
    ],
)
def test_a_failure_before_the_first_step(failure: Failure, action: str) -> None:
    assert _decide(failure, committed=-1).action == action


def test_a_failure_in_the_set_up_of_a_run_that_had_worked_is_tried_again() -> None:
    raised = _failure("exception", step=0, cause="ConnectionError")
    assert _decide(raised, committed=5).action == "restart"
    assert _decide(raised, _past(raised), committed=5).error == "crash_loop"


def test_the_same_failure_at_the_same_step_is_a_crash_loop() -> None:
    decision = _decide(_RAISED, _past(_RAISED))
    assert (decision.action, decision.error) == ("stop", "crash_loop")
    assert "same failure at the same step 10" in decision.reason


@pytest.mark.parametrize("failure", [_KILLED, _LOST], ids=lambda failure: failure.kind)
@pytest.mark.parametrize(("step", "committed"), [(0, -1), (10, 5)])
def test_what_comes_from_outside_is_a_crash_loop_at_the_third_time(step: int, committed: int, failure: Failure) -> None:
    first, second = (dataclasses.replace(failure, step=step, rank=rank) for rank in (0, 1))
    assert _decide(second, _past(first, committed=committed), committed=committed).action == "restart"
    decision = _decide(first, _past(first, second, committed=committed), committed=committed)
    assert (decision.action, decision.error) == ("stop", "crash_loop")


def test_numbers_in_the_message_do_not_make_another_failure() -> None:
    again = dataclasses.replace(_RAISED, message="boom 43", rank=0)
    assert _decide(again, _past(_RAISED)).error == "crash_loop"


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(_RAISED, step=11),
        dataclasses.replace(_RAISED, cause="KeyError"),
        dataclasses.replace(_RAISED, message="bang"),
    ],
)
def test_another_failure_or_another_step_is_tried_again(other: Failure) -> None:
    assert _decide(other, _past(_RAISED)).action == "restart"


def test_progress_refills_the_budget() -> None:
    history = _past(_KILLED, dataclasses.replace(_KILLED, step=11), dataclasses.replace(_KILLED, step=12), committed=5)
    new = dataclasses.replace(_KILLED, step=30)
    assert _decide(new, history, committed=5, max_restarts=3).action == "stop"
    decision = _decide(new, history, committed=20, max_restarts=3)
    assert (decision.action, decision.wait_seconds) == ("restart", 0.0)


def test_the_budget_ends_with_a_reason() -> None:
    history = _past(*(dataclasses.replace(_KILLED, step=step) for step in (11, 12)))
    decision = _decide(_KILLED, history, max_restarts=2)
    assert (decision.action, decision.error) == ("stop", "crash_loop")
    assert "2 restarts brought no new checkpoint (restarts=2)" in decision.reason


def test_waits_double_up_to_a_minute() -> None:
    waits = []
    history: list[Past] = []
    for step in range(12):
        failure = dataclasses.replace(_KILLED, step=100 + step)
        decision = decide(
            failure, history, RestartPolicy(max_restarts=100, backoff_seconds=0.5), committed_step=5, jitter=0.0
        )
        waits.append(decision.wait_seconds)
        history += _past(failure)
    assert waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
    spread = decide(_KILLED, history, RestartPolicy(max_restarts=100), committed_step=5, jitter=0.25)
    assert spread.wait_seconds == pytest.approx(75.0)


def _kept(*failures: Failure, committed: int = 5) -> list[Past]:
    return [dataclasses.replace(past, in_process=True) for past in _past(*failures, committed=committed)]


@pytest.mark.parametrize("unrecoverable", [False, True])
@pytest.mark.parametrize("committed", [-1, 5])
def test_a_process_that_was_used_again_and_never_got_to_a_step_proves_nothing(
    committed: int, unrecoverable: bool
) -> None:
    """It may not bear a second call, whatever its error says: that must not end a run which had trained."""
    twice = _failure("exception", step=0, cause="RuntimeError", message="context has already been set")
    twice = dataclasses.replace(twice, unrecoverable=unrecoverable)
    assert _decide(twice, _kept(_RAISED, committed=committed), committed=committed, max_restarts=1).action == "restart"
    assert _decide(twice, _past(_RAISED, committed=committed), committed=-1, max_restarts=1).action == "stop"
    history = History(RestartPolicy())
    history.add(_RAISED, committed_step=committed, in_process=True)
    assert not history.may_go_on(twice, committed_step=committed)


def test_a_failure_that_was_seen_only_in_processes_that_were_used_again_gets_fresh_ones() -> None:
    other = dataclasses.replace(_RAISED, cause="KeyError")
    history = History(RestartPolicy(max_restarts=9))
    history.add(other, committed_step=5, in_process=True)
    assert history.may_go_on(_RAISED, committed_step=5)
    history.add(_RAISED, committed_step=5, in_process=True)
    assert history.decide(_RAISED, committed_step=5).action == "restart"
    assert not history.may_go_on(_RAISED, committed_step=5)
    history.add(_RAISED, committed_step=5, in_process=False)
    assert history.decide(_RAISED, committed_step=5).error == "crash_loop"
