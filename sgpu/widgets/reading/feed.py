"""From a run folder to Snapshots: reads what was added since the last one, and writes nothing."""

from __future__ import annotations

from collections import deque

from sgpu.contract import atomic
from sgpu.contract.clock import Clock, SystemClock
from sgpu.contract.heartbeat import Beat
from sgpu.contract.process import read_process
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import read_spec
from sgpu.contract.status import Status, read_status
from sgpu.widgets.follow import Pacer
from sgpu.widgets.reading import ledger
from sgpu.widgets.reading.logs import Logs
from sgpu.widgets.reading.machines import machines
from sgpu.widgets.reading.past import Past
from sgpu.widgets.reading.sentences import failure_words
from sgpu.widgets.reading.snapshot import Failure, Goodput, Snapshot, TrackingLink
from sgpu.widgets.reading.spools import Spools
from sgpu.widgets.reading.timeline import Timeline, tried
from sgpu.widgets.reading.usage import Usages
from sgpu.widgets.words import plain, visible, whole

_PACE_WINDOW_SECONDS = 30.0
_PACE_LEAST_SECONDS = 2.0
_START_GRACE_SECONDS = 10.0
_USAGE_SECONDS = 2.0
_GONE_GRACE_SECONDS = 2.0  # its last words may just have been written


class Pace:
    """Steps a second, from the steps that were seen in the last half minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def observe(self, now: float, step: int) -> None:
        if step == 0 or (self._seen and step < self._seen[-1][1]):
            self._seen.clear()  # the start says nothing about steps; or a restart went back
        if step == 0:
            return
        self._seen.append((now, step))
        while now - self._seen[0][0] > _PACE_WINDOW_SECONDS:
            self._seen.popleft()

    def steps_per_second(self) -> float | None:
        return _slope(list(self._seen))


def _slope(seen: list[tuple[float, int]]) -> float | None:
    if len(seen) < 2 or seen[-1][0] - seen[0][0] < _PACE_LEAST_SECONDS or seen[-1][1] <= seen[0][1]:
        return None
    return (seen[-1][1] - seen[0][1]) / (seen[-1][0] - seen[0][0])


class Feed:
    """Follows one run.

    Args:
        run: the folder of a run that was started, at least its spec.json.
        clock: what time it is.

    Raises:
        SgpuError: there is no run in that folder, or another version of sgpu made it.
    """

    def __init__(self, run: RunDir, *, clock: Clock | None = None) -> None:
        self.run = run
        self._clock = clock or SystemClock()
        self._spec = read_spec(run)
        self._timeline = Timeline(run)
        self._spools = Spools(run, self._spec.world_size, Past(run, clock=self._clock))
        self._logs = Logs(run, self._spec.world_size)
        self._usages = Usages(run, self._spec.nodes)
        self._usage_pacer = Pacer(self._clock, _USAGE_SECONDS)
        self._heartbeat = ledger.HeartbeatReader(run.heartbeat)
        self._pace = Pace()
        self._tracking: TrackingLink | None = None
        self._gone_since: float | None = None

    def snapshot(self) -> Snapshot:
        """What there is now. Costs a few system calls a rank, and the reading of what is new."""
        status = read_status(self.run) or Status(state="STARTING", updated=self._spec.created)
        removed = not self.run.root.exists()
        state = "LOST" if removed or (not status.final and self._agent_gone()) else status.state
        over = status.final or state == "LOST"
        beats = self._heartbeat.beats()
        self._timeline.refresh()
        self._spools.refresh()
        self._logs.refresh()
        if self._usage_pacer.due() or over:
            self._usages.refresh()
        step = self._step(status, beats, over)
        total = self._total(status, beats)
        started = status.started or self._spec.created
        elapsed = max(0.0, (self._end(status) if over else self._clock.wall()) - started)
        rate = self._rate(step, elapsed, over)
        failure = self._failure(status)
        return Snapshot(
            id=self._spec.id,
            name=self._spec.name,
            folder=str(self.run.root),
            state=state,
            final=over and self._spools.caught_up,
            behind=not self._spools.caught_up,
            elapsed_seconds=elapsed,
            started=started,
            step=step,
            epoch=max([status.epoch, *(beat.epoch for beat in beats)]),
            total_steps=total,
            steps_per_second=rate,
            eta_seconds=max(0, total - step) / rate if total and rate and not over else None,
            world_size=self._spec.world_size,
            workers=status.world_size or self._spec.world_size,
            nodes=self._spec.nodes,
            accelerator=self._spec.accelerator,
            generation=status.generation,
            restarts=max(status.restarts, self._timeline.restarts),
            goodput=self._goodput(beats, over),
            series=self._spools.series(),
            marks=self._timeline.marks,
            happenings=self._timeline.happenings,
            earlier_happenings=self._timeline.earlier,
            machines=machines(self._spec, status, beats, over=over),
            usage=self._usages.usage(),
            logs=self._logs.tails(front=failure.rank if failure else None),
            failure=failure,
            tracking=self._link(),
            note="the run's folder was removed" if removed else self._spools.note,
        )

    def close(self) -> None:
        self._heartbeat.close()

    def _step(self, status: Status, beats: list[Beat], over: bool) -> int:
        slowest = ledger.slowest_step(beats)
        if slowest is None:
            return status.step
        return max(status.step, slowest) if over else slowest

    def _total(self, status: Status, beats: list[Beat]) -> int | None:
        return max([status.total_steps or 0, *(beat.total_steps for beat in beats)]) or None

    def _end(self, status: Status) -> float:
        return status.ended or status.updated

    def _rate(self, step: int, elapsed: float, over: bool) -> float | None:
        if over:  # without the start, which says little about the steps
            since_first = _slope([self._spools.first, *self._spools.pace]) if self._spools.first else None
            return since_first or (step / elapsed if step and elapsed else None)
        self._pace.observe(self._clock.monotonic(), step)
        return self._pace.steps_per_second() or _slope(list(self._spools.pace))

    def _goodput(self, beats: list[Beat], over: bool) -> Goodput | None:
        if not beats:
            return None
        until_ns = ledger.last_sign_ns(beats) if over else int(self._clock.monotonic() * 1e9)
        return ledger.goodput(beats, until_ns, self._spec.accelerator, told=self._timeline.bottleneck)

    def _failure(self, status: Status) -> Failure | None:
        facts = status.failure
        if not isinstance(facts, dict):
            return None
        names = ("rank", "step", "message")
        cause = facts.get("cause") or facts.get("kind")
        return Failure(
            summary=failure_words(cause=cause, **{name: facts.get(name) for name in names}),
            rank=whole(facts.get("rank")),
            step=whole(facts.get("step")),
            message=visible(str(facts.get("message") or "")),
            traceback=visible(str(facts.get("traceback") or "")),
            tried=tried(max(status.restarts, self._timeline.restarts), plain(facts.get("reason"))),
            resume_step=self._timeline.checkpoint_step,
        )

    def _link(self) -> TrackingLink | None:
        if self._tracking is None:
            facts = atomic.read_json(self.run.mlflow)
            if isinstance(facts, dict):
                self._tracking = TrackingLink(
                    run_id=plain(facts.get("run_id")),
                    url=plain(facts.get("url"), 2000),
                    command=plain(facts.get("open_command"), 2000),
                )
        return self._tracking

    def _agent_gone(self) -> bool:
        """Whether a run of this machine has been without its supervisor's process for a while."""
        if self._spec.backend != "local":
            return False
        agent = read_process(self.run.agent)
        young = self._clock.wall() - self._spec.created < _START_GRACE_SECONDS
        if (agent is None and young) or (agent is not None and agent.alive()):
            self._gone_since = None
            return False
        if self._gone_since is None:
            self._gone_since = self._clock.monotonic()
        return self._clock.monotonic() - self._gone_since >= _GONE_GRACE_SECONDS
