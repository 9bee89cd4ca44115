"""The supervisor's policy and watchdog over thousands of simulated runs; what has to hold is checked apart."""

from __future__ import annotations

import pathlib
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest

from sgpu.contract.policies import RestartPolicy
from sgpu.goodput import expected_goodput
from sgpu.testing import simulator
from sgpu.testing.simulator import LLAMA_3, LLAMA_3_MTBF_SECONDS, Attempt, Cause, Job, Simulated

_SEEDS = 3000
_MOST_WAIT_SECONDS = 60 * 1.25


def _random_job(seed: int) -> Job:
    """Faults far denser than in life: often several within one checkpoint's interval, or during a restart."""
    draw = random.Random(f"job {seed}")
    step_seconds, every = draw.choice((0.01, 0.3, 5.0, 60.0)), draw.choice((1, 7, 50, 400))
    interval = step_seconds * every
    steps = every * draw.randint(2, 40)
    return Job(
        ranks=int(2 ** draw.uniform(0, 14)), steps=steps, step_seconds=step_seconds, every_steps=every,
        blocked_seconds=draw.choice((0.0, 0.01, 0.2)) * interval,
        durable_seconds=draw.choice((0.0, 0.1, 0.5, 1.5)) * interval,
        restart_seconds=draw.choice((0.2, 5.0, 300.0)),
        mtbf_seconds=interval * draw.choice((0.7, 2.0, 10.0, 100.0)) + draw.choice((0.0, 100.0)),
        causes=(*LLAMA_3, Cause(name="a name that is not there", kind="exception", weight=2, unrecoverable=True)),
        bug_step=draw.randint(1, steps - 1) if draw.random() < 0.2 else None,
        commits=draw.random() < 0.9,
        policy=RestartPolicy(max_restarts=draw.choice((0, 1, 3, 10)), backoff_seconds=draw.choice((0.0, 1.0, 30.0))),
    )  # fmt: skip


def _check(run: Simulated) -> None:
    """What has to hold for any run. Knows the attempts only, not why anything was decided."""
    job, attempts = run.job, run.attempts
    committed, restarts = -1, 0
    for number, attempt in enumerate(attempts):
        assert attempt.from_step == max(0, committed), "it begins at the newest durable checkpoint"
        assert attempt.committed_step >= committed, "no commit is lost"
        assert attempt.from_step <= attempt.reached <= job.steps
        assert attempt.committed_step <= attempt.reached
        assert attempt.began <= attempt.ended
        if attempt.decision is not None:
            assert (attempt.decision.action == "restart") == (number < len(attempts) - 1)
        restarts = 0 if attempt.committed_step > committed else restarts
        committed = attempt.committed_step
        if attempt.decision is not None and attempt.decision.action == "restart":
            restarts += 1
            assert restarts <= job.policy.max_restarts, "the budget is never overdrawn"
            assert 0 <= attempt.decision.wait_seconds <= _MOST_WAIT_SECONDS
            assert attempt.failure is not None
            assert not attempt.failure.unrecoverable, "what would happen again is not tried again"
        if attempt.blamed is not None:
            assert attempt.blamed == attempt.culprit, "the rank that holds the others up is named"
    for before, after in pairwise(attempts):
        assert before.decision is not None
        assert after.began == pytest.approx(before.ended + before.decision.wait_seconds)
    assert max(_tries(attempts), default=0) <= 3, "the same failure at the same step is tried three times at most"
    if run.state == "SUCCEEDED":
        assert attempts[-1].reached == job.steps
        assert job.bug_step is None
    else:
        last = attempts[-1]
        assert last.decision is not None
        assert last.decision.reason
    assert 0 <= run.goodput <= 1


def _tries(attempts: tuple[Attempt, ...]) -> Iterator[int]:
    """How often each failure came again at its step, with no new checkpoint in between."""
    seen: dict[tuple[str, int, int], int] = {}
    for attempt in attempts:
        failure = attempt.failure
        if failure is not None:
            key = failure.fingerprint, failure.step, attempt.committed_step
            seen[key] = seen.get(key, 0) + 1
            yield seen[key]


def test_three_thousand_runs() -> None:
    states, attempts, hangs, largest = {"SUCCEEDED": 0, "FAILED": 0}, 0, 0, 0
    for seed in range(_SEEDS):
        run = simulator.run(_random_job(seed), seed)
        _check(run)
        states[run.state] += 1
        attempts += len(run.attempts)
        hangs += sum(attempt.blamed is not None for attempt in run.attempts)
        largest = max(largest, run.job.ranks)
    assert min(states.values()) > _SEEDS / 10, "both ends are common, or little was tested"
    assert attempts > 3 * _SEEDS
    assert hangs > 100
    assert largest > 8000


def test_the_check_can_fail() -> None:
    """A planted fault for each thing that it looks at."""
    seeds = (seed for seed in range(1000) if len(simulator.run(_random_job(seed), seed).attempts) > 3)
    run = next(run for run in (simulator.run(_random_job(seed), seed) for seed in seeds) if run.job.policy.max_restarts)
    _check(run)
    first, second, *rest = run.attempts
    assert second.failure is not None
    assert first.decision is not None
    broken = [
        replace(run, attempts=(first, replace(second, from_step=second.from_step + 1), *rest)),
        replace(run, attempts=(first, replace(second, committed_step=-2), *rest)),
        replace(run, attempts=(replace(first, decision=replace(first.decision, wait_seconds=900.0)), second, *rest)),
        replace(run, attempts=(first, replace(second, culprit=1, blamed=0), *rest)),
        replace(run, attempts=(first, replace(second, failure=replace(second.failure, unrecoverable=True)), *rest)),
        replace(run, job=replace(run.job, policy=RestartPolicy(max_restarts=0))),
        replace(run, attempts=(first, *[second] * 4, *rest)),
    ]
    for each in broken:
        with pytest.raises(AssertionError):
            _check(each)


def test_a_bug_that_stays_ends_the_run_soon() -> None:
    job = Job(ranks=8, steps=1000, step_seconds=1.0, every_steps=100, mtbf_seconds=1e12, bug_step=250)
    run = simulator.run(job, seed=1)
    assert (run.state, [attempt.reached for attempt in run.attempts]) == ("FAILED", [250, 250])
    last = run.attempts[-1]
    assert last.decision is not None
    assert (last.decision.error, last.committed_step) == ("crash_loop", 200)


def test_one_of_sixteen_thousand_ranks_is_named() -> None:
    assert simulator.watch(16384, 700, 9_999, limit_seconds=60.0) == 9_999


def test_the_same_seed_is_the_same_run() -> None:
    assert simulator.run(_random_job(5), 5) == simulator.run(_random_job(5), 5)


def test_without_a_fault_nothing_is_lost() -> None:
    job = Job(
        ranks=2, steps=100, step_seconds=2.0, every_steps=10, blocked_seconds=1.0, restart_seconds=10.0,
        mtbf_seconds=1e12,
    )  # fmt: skip
    run = simulator.run(job, seed=1)
    assert (run.state, run.wall_seconds) == ("SUCCEEDED", 10 + 100 * 2 + 10 * 1)


def test_the_formula_and_the_simulator_agree() -> None:
    """`goodput.expected_goodput` knows nothing of policy or watchdog; over a long run both tell the same."""
    job = simulator.llama_3(restart_seconds=300.0)
    found = [simulator.run(job, seed) for seed in range(6)]
    assert {run.state for run in found} == {"SUCCEEDED"}
    expected = expected_goodput(
        job.every_steps * job.step_seconds, LLAMA_3_MTBF_SECONDS, stall_seconds=job.blocked_seconds,
        durable_seconds=job.durable_seconds, restart_seconds=job.restart_seconds,
    )  # fmt: skip
    assert sum(run.goodput for run in found) / 6 == pytest.approx(expected, abs=0.01)
    failures = [len(run.attempts) - 1 for run in found]
    assert sum(failures) / 6 == pytest.approx(419, rel=0.1)


def test_the_figure_is_what_the_simulator_says() -> None:
    """The table beside the figure in the docs."""
    text = (pathlib.Path(__file__).parents[2] / "docs" / "simulator.md").read_text()
    row = r"^\| (\d+) s \| ([\d.]+) % \| ([\d.]+) % to ([\d.]+) % \| (\d+) \| (\d+) \|$"
    rows = re.findall(row, text, re.M)
    assert [int(seconds) for seconds, *_ in rows] == list(simulator.FIGURE_RESTART_SECONDS)
    for seconds, *told in (rows[0], rows[-1]):
        found = simulator.predict(float(seconds))
        shares = [f"{100 * share:.1f}" for share in (found.goodput, found.lowest, found.highest)]
        assert told == [*shares, str(round(found.failures)), str(found.given_up)]
