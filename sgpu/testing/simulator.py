"""A run on virtual time: the supervisor's own policy and watchdog, under failures drawn from a seed.

What decides is the product's code (`policy.decide`, `watchdog.silent`, `limits.StepTimes`); what is modelled is the
job: steps, checkpoints that become durable later, starts, and failures at exponential times. Between two failures
nothing is stepped through, so that months of 16,384 ranks take milliseconds.

Source of the failures of Llama 3: "The Llama 3 Herd of Models", arXiv 2407.21783, table 5: 419 unexpected interruptions
in 54 days on 16,384 GPUs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from sgpu.agent.judging.failure import Failure, Kind
from sgpu.agent.judging.limits import Limits, StepTimes
from sgpu.agent.judging.policy import Decision, Past, decide
from sgpu.agent.judging.watchdog import silent
from sgpu.contract.beat import Beat, Category, Section, WorkerState
from sgpu.contract.policies import RestartPolicy

_TURN_SECONDS = 0.05
_FLOOR_SECONDS = 60.0
_STACKS_SECONDS = 0.3
_MOST_WATCHED = 32


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One kind of failure, and how often it is among all."""

    name: str
    kind: Kind
    weight: float
    unrecoverable: bool = False


LLAMA_3: tuple[Cause, ...] = (
    Cause(name="faulty GPU", kind="signal", weight=148),
    Cause(name="GPU memory (HBM3)", kind="signal", weight=72),
    Cause(name="software bug", kind="exception", weight=54),
    Cause(name="network switch or cable", kind="hang", weight=35),
    Cause(name="unplanned maintenance of a host", kind="infrastructure", weight=32),
    Cause(name="GPU SRAM", kind="signal", weight=19),
    Cause(name="GPU system processor", kind="signal", weight=17),
    Cause(name="network card", kind="hang", weight=7),
    Cause(name="time-out of a collective", kind="hang", weight=7),
    Cause(name="silent data corruption", kind="exception", weight=6),
    Cause(name="GPU thermal interface and sensor", kind="signal", weight=6),
    Cause(name="SSD", kind="infrastructure", weight=3),
    Cause(name="power supply", kind="infrastructure", weight=3),
    Cause(name="chassis, IO board, CPU, system memory, dependency", kind="infrastructure", weight=10),
)
LLAMA_3_MTBF_SECONDS = 54 * 86400 / 419


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is simulated.

    Attributes:
        steps: to be completed.
        every_steps: between two checkpoints; each stops training for `blocked_seconds`, and can be restored
            `durable_seconds` after that.
        restart_seconds: from a decision to restart until the first step begins: processes, rendezvous, restoring.
        mtbf_seconds: mean time between failures, restarts counted.
        bug_step: a step that fails whenever it is reached.
        commits: whether checkpoints ever become durable.
    """

    ranks: int
    steps: int
    step_seconds: float
    every_steps: int
    mtbf_seconds: float
    blocked_seconds: float = 0.0
    durable_seconds: float = 0.0
    restart_seconds: float = 1.0
    causes: Sequence[Cause] = LLAMA_3
    bug_step: int | None = None
    commits: bool = True
    policy: RestartPolicy = field(default_factory=RestartPolicy)


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One generation.

    Attributes:
        began, first_step_at, ended: virtual seconds.
        from_step: what was restored. `reached`: completed steps at its end.
        committed_step: the newest durable checkpoint at its end, -1: none.
        failure: None: it completed the job.
        blamed: the rank that the watchdog named, where it was a hang.
    """

    began: float
    first_step_at: float
    ended: float
    from_step: int
    reached: int
    committed_step: int
    failure: Failure | None = None
    decision: Decision | None = None
    culprit: int | None = None
    blamed: int | None = None


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What came of it."""

    state: Literal["SUCCEEDED", "FAILED"]
    attempts: tuple[Attempt, ...]
    job: Job

    @property
    def wall_seconds(self) -> float:
        return self.attempts[-1].ended

    @property
    def goodput(self) -> float:
        """Seconds of steps that count / wall time; a step that was done again counts once."""
        return self.attempts[-1].reached * self.job.step_seconds / self.wall_seconds


def run(job: Job, seed: int) -> Simulated:
    """Runs a job to its end; the same seed gives the same run."""
    draw = random.Random(seed)
    history: list[Past] = []
    attempts: list[Attempt] = []
    now, committed, times = 0.0, -1, StepTimes()
    fails_at = draw.expovariate(1 / job.mtbf_seconds)
    while True:
        attempt, cause = _attempt(job, now, committed, fails_at)
        times.add(job.step_seconds, max(1, attempt.reached - attempt.from_step))
        committed = attempt.committed_step
        if cause is None:
            return Simulated(state="SUCCEEDED", attempts=(*attempts, attempt), job=job)
        if cause is _STRUCK:
            cause = draw.choices(job.causes, [each.weight for each in job.causes])[0]
            fails_at = attempt.ended + draw.expovariate(1 / job.mtbf_seconds)
        attempt = _fail(job, attempt, cause, culprit=draw.randrange(job.ranks), times=times)
        assert attempt.failure is not None
        decision = decide(
            attempt.failure, history, job.policy, committed_step=committed, jitter=draw.random() / 4
        )  # fmt: skip
        attempts.append(replace(attempt, decision=decision))
        if decision.action == "stop":
            return Simulated(state="FAILED", attempts=tuple(attempts), job=job)
        history.append(Past(failure=attempt.failure, committed_step=committed))
        now = attempt.ended + decision.wait_seconds
        fails_at = max(fails_at, now)  # what strikes while nobody runs is found at the start


_BUG = Cause(name="the same bug", kind="exception", weight=0)
_STRUCK = Cause(name="to be drawn", kind="signal", weight=0)


def _attempt(job: Job, began: float, committed: int, fails_at: float) -> tuple[Attempt, Cause | None]:
    """From one start to its end, by arithmetic."""
    first, restored = began + job.restart_seconds, max(0, committed)
    cycle = job.every_steps * job.step_seconds + job.blocked_seconds
    last = job.steps if job.bug_step is None else min(job.steps, job.bug_step)

    def time_of(step: int) -> float:
        """When a step is complete; `restored` is a multiple of `every_steps`, or 0."""
        cycles, rest = divmod(step - restored, job.every_steps)
        return first + cycles * cycle + rest * job.step_seconds

    ends_at = time_of(last) + (job.step_seconds if last < job.steps else 0.0)
    ended = min(ends_at, max(fails_at, began))
    cause = _STRUCK if ended < ends_at else _BUG if last < job.steps else None
    reached = last
    if cause is _STRUCK:
        cycles, rest = divmod(max(0.0, ended - first), cycle)
        done = restored + int(cycles) * job.every_steps + min(job.every_steps, int(rest / job.step_seconds))
        reached = min(last, done)
    if job.commits and ended > first:
        whole = int((ended - first - job.blocked_seconds - job.durable_seconds) // cycle)
        newest = min(restored + max(0, whole) * job.every_steps, reached - reached % job.every_steps)
        committed = newest if newest > restored else committed
    attempt = Attempt(
        began=began, first_step_at=first, ended=ended, from_step=restored, reached=reached, committed_step=committed
    )  # fmt: skip
    return attempt, cause


def _fail(job: Job, attempt: Attempt, cause: Cause, *, culprit: int, times: StepTimes) -> Attempt:
    """The attempt, at the moment at which its failure is known and its workers are gone."""
    detected, blamed = _TURN_SECONDS, None
    if cause.kind == "hang":
        if attempt.reached > attempt.from_step:
            limit = times.limit_seconds(_FLOOR_SECONDS)
            culprit %= _MOST_WATCHED  # all that wait are alike: so many stand for them
            blamed = watch(min(job.ranks, _MOST_WATCHED), attempt.reached, culprit, limit_seconds=limit)
            detected = limit + _STACKS_SECONDS + _TURN_SECONDS
        else:  # before its first step, the rank has the limit of a start
            detected = job.policy.start_seconds or _FLOOR_SECONDS
    failure = Failure(
        kind=cause.kind, rank=culprit, generation=0, step=attempt.reached, message=cause.name, time=attempt.ended,
        cause="SIGKILL, signal 9" if cause.kind == "signal" else cause.name, unrecoverable=cause.unrecoverable,
    )  # fmt: skip
    return replace(attempt, ended=attempt.ended + detected, failure=failure, culprit=culprit, blamed=blamed)


def watch(ranks: int, step: int, culprit: int, *, limit_seconds: float) -> int | None:
    """Whom the watchdog blames when `culprit` stays in a step and the others wait for it in a collective.

    Raises:
        AssertionError: it raised an alarm before the limit, or none after it.
    """
    limits = Limits(step_seconds=limit_seconds, long_seconds=3 * limit_seconds)
    waiting = Beat(
        beat_ns=0, step=step, high_step=step, epoch=0, total_steps=-1, generation=0, pid=1, state=WorkerState.TRAINING,
        section=Section.COLLECTIVE, section_since_ns=0, section_limit_seconds=0.0, category=Category.PRODUCTIVE,
        ledger_since_ns=0, started_ns=0, seconds=(0.0,) * len(Category),
    )  # fmt: skip
    beats = [waiting] * ranks
    beats[culprit] = replace(waiting, section=Section.STEP)
    early = math.floor(limit_seconds * 0.999e9)
    if silent(beats, limits=limits, now_ns=early) is not None:
        raise AssertionError(f"an alarm before {limit_seconds:g} s")
    silence = silent(beats, limits=limits, now_ns=early + int(0.01e9 * (1 + limit_seconds)))
    if silence is None:
        raise AssertionError(f"no alarm after {limit_seconds:g} s")
    return silence.rank


# ---- the figure in docs/simulator.md

FIGURE_RESTART_SECONDS = (1, 10, 30, 60, 120, 300, 600, 900, 1200, 1800)
_FIGURE_SEEDS = 20


def llama_3(*, restart_seconds: float) -> Job:
    """54 days of training on 16,384 GPUs, failing as published.

    Steps of 5 s, a checkpoint every 100 of them that stops training for 1 s and is durable 60 s later: assumed, since
    they are not published. `max_restarts=20`: where restarts are long, several failures may come
    before the next checkpoint.
    """
    return Job(
        ranks=16384, steps=54 * 86400 // 5, step_seconds=5.0, every_steps=100, blocked_seconds=1.0,
        durable_seconds=60.0, restart_seconds=restart_seconds, mtbf_seconds=LLAMA_3_MTBF_SECONDS,
        policy=RestartPolicy(max_restarts=20),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Means and extremes over the seeds of the figure, of runs that succeeded; `given_up`: how many did not."""

    restart_seconds: float
    goodput: float
    lowest: float
    highest: float
    failures: float
    given_up: int


def predict(restart_seconds: float) -> Prediction:
    """What Llama 3's failures cost with restarts that take so long."""
    runs = [run(llama_3(restart_seconds=restart_seconds), seed) for seed in range(_FIGURE_SEEDS)]
    ended = [each for each in runs if each.state == "SUCCEEDED"]
    shares = [each.goodput for each in ended]
    return Prediction(
        restart_seconds=restart_seconds, goodput=sum(shares) / len(shares), lowest=min(shares), highest=max(shares),
        failures=sum(len(each.attempts) - 1 for each in ended) / len(ended), given_up=len(runs) - len(ended),
    )  # fmt: skip
