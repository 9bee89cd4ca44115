"""A run as text: a whole page of it, or lines that tell what is new and do not flood."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TextIO

from sgpu.contract.clock import Clock, SystemClock
from sgpu.widgets.reading.machines import machine_line
from sgpu.widgets.reading.snapshot import Failure, Goodput, Happening, Snapshot
from sgpu.widgets.words import STATE_WORDS, count, percent, plain, plural, rate, seconds, workers

_HAPPENINGS_SHOWN = 15
_LOG_LINES_SHOWN = 12
_METRICS_SHOWN = 20
_USAGE_LINES_SHOWN = 24
_PROGRESS_SECONDS = 5.0
_PROGRESS_SHARE = 0.02  # of the elapsed time, so that a day's run is told in some hundred lines
_LINES_A_REFRESH = 12


def headline(snapshot: Snapshot) -> str:
    """`train: running on 8 GPUs for 41 min`."""
    where = workers(snapshot.workers, snapshot.accelerator, snapshot.nodes)
    state = STATE_WORDS.get(snapshot.state, snapshot.state.lower())
    word = "after" if snapshot.final else "for"
    restarts = f", {plural(snapshot.restarts, 'restart')}" if snapshot.restarts else ""
    return f"{plain(snapshot.name)}: {state} on {where} {word} {seconds(snapshot.elapsed_seconds)}{restarts}"


def progress(snapshot: Snapshot) -> str:
    """`step 1,200 / 5,000 (24.0 %), 8.3 steps/s, 7 min 38 s left`; empty while no step is known."""
    if not snapshot.step and not snapshot.total_steps:
        return ""
    words = f"step {count(snapshot.step)}"
    if snapshot.total_steps:
        words += f" / {count(snapshot.total_steps)} ({percent(min(1.0, snapshot.step / snapshot.total_steps))})"
    if snapshot.steps_per_second:
        words += f", {rate(snapshot.steps_per_second)}" + (" on average" if snapshot.final else "")
    if snapshot.eta_seconds is not None:
        words += f", {seconds(snapshot.eta_seconds)} left"
    return words


def goodput_lines(goodput: Goodput) -> list[str]:
    parts = ", ".join(f"{part.label} {percent(part.share)}" for part in goodput.parts if part.share >= 0.0005)
    return [f"goodput: {goodput.sentence}", f"  {parts}"] + ([f"  {goodput.advice}"] if goodput.advice else [])


def failure_lines(failure: Failure, run_id: str) -> list[str]:
    """The root cause first, then what was tried and how to go on."""
    lines = [f"root cause: {failure.summary}"]
    lines += [f"    {line}" for line in failure.traceback.rstrip().splitlines()]
    return [*lines, f"tried: {failure.tried}; {resume_words(failure, run_id)}"]


def resume_words(failure: Failure, run_id: str) -> str:
    if failure.resume_step is None:
        return "there is no checkpoint to go on from"
    return f'sgpu.attach("{run_id}").resume() goes on from step {count(failure.resume_step)}'


def render(snapshot: Snapshot) -> str:
    """The whole snapshot as text of some dozen lines."""
    return "\n".join(_sections(snapshot))


def _sections(snapshot: Snapshot) -> Iterator[str]:
    yield headline(snapshot)
    if words := progress(snapshot):
        yield words
    if snapshot.failure is not None:
        yield from failure_lines(snapshot.failure, snapshot.id)
    if snapshot.goodput is not None:
        yield from goodput_lines(snapshot.goodput)
    yield from (machine_line(machine) for machine in snapshot.machines)
    yield from usage_lines(snapshot)
    own = [series for series in snapshot.series.values() if series.rank == 0]
    if own:
        more = f", and {count(len(own) - _METRICS_SHOWN)} more" if len(own) > _METRICS_SHOWN else ""
        yield "metrics: " + ", ".join(f"{plain(s.name, 60)} {s.latest}" for s in own[:_METRICS_SHOWN]) + more
        yield from (f"  {plain(series.name, 60)}: {series.note}" for series in own if series.note)
    yield from _happenings(snapshot)
    if snapshot.logs:
        log = snapshot.logs[0]
        yield f"log of rank {log.rank} ({log.path}):"
        yield from (f"  {line}" for line in log.lines[-_LOG_LINES_SHOWN:])
    if snapshot.tracking is not None:
        yield f"MLflow: {snapshot.tracking.url or snapshot.tracking.command}"
    if snapshot.note:
        yield f"note: {snapshot.note}"
    yield f"folder: {snapshot.folder}"


def usage_lines(snapshot: Snapshot) -> list[str]:
    """`node 0: CPU 93 %, memory 3.1 GB of 8.0 GB, …`, then a line a rank; of many, the first."""
    places: dict[tuple[int, int | None], list[str]] = {}
    for one in snapshot.usage:
        places.setdefault((one.node, one.rank), []).append(f"{one.label} {one.now}")
    if not places:
        return []
    lines = [
        (f"  node {node}: " if rank is None else f"    rank {rank}: ") + ", ".join(words)
        for (node, rank), words in places.items()
    ]
    more = len(lines) - _USAGE_LINES_SHOWN
    rest = [f"  … and {plural(more, 'more line', 'more lines')}"] if more > 0 else []
    return ["machines" + (", at the last look:" if snapshot.final else ":"), *lines[:_USAGE_LINES_SHOWN], *rest]


def _happenings(snapshot: Snapshot) -> Iterator[str]:
    shown = [happening for happening in snapshot.happenings if happening.level != "detail"]
    if not shown:
        return
    before = len(shown[:-_HAPPENINGS_SHOWN]) + snapshot.earlier_happenings
    yield "events:" + (f" (the newest; {count(before)} more in events.jsonl)" if before else "")
    yield from (f"  {stamp(snapshot, happening)} {happening.sentence}" for happening in shown[-_HAPPENINGS_SHOWN:])


def stamp(snapshot: Snapshot, happening: Happening) -> str:
    """Time since the run's start: `0:01:23`."""
    return clock_text(happening.time - snapshot.started)


def clock_text(elapsed_seconds: float) -> str:
    minutes, rest = divmod(int(max(0.0, elapsed_seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


class TextView:
    """Prints a line when there is something worth telling.

    Events at once, checkpoints folded into the next line of progress, progress every five seconds at first and every
    fiftieth of the elapsed time later on.
    """

    def __init__(self, stream: TextIO | None, *, clock: Clock | None = None) -> None:
        """`stream` is None where the process has no standard output: nothing is told then."""
        self._stream = stream
        self._clock = clock or SystemClock()
        self._next_number = 0
        self._last_progress: float | None = None
        self._told_step = -1
        self._checkpoints: list[Happening] = []
        self._linked = False
        self._started = False

    def show(self, snapshot: Snapshot) -> None:
        """Tells what is new since the last call."""
        if not self._started:
            self._started = True
            self._print(f"{headline(snapshot)} (folder: {snapshot.folder})")
        if snapshot.tracking is not None and not self._linked:
            self._linked = True
            self._print(f"MLflow: {snapshot.tracking.url or snapshot.tracking.command}")
        self._tell_happenings(snapshot)
        now = self._clock.monotonic()
        if self._last_progress is None:
            self._last_progress = now
        if now - self._last_progress >= max(_PROGRESS_SECONDS, _PROGRESS_SHARE * snapshot.elapsed_seconds):
            self._last_progress = now
            self._tell_progress(snapshot)

    def finish(self, snapshot: Snapshot) -> None:
        """Tells the rest, and the end."""
        self.show(snapshot)
        self._tell_progress(snapshot)
        lines = [headline(snapshot)]
        if snapshot.failure is not None:
            lines += failure_lines(snapshot.failure, snapshot.id)
            if snapshot.logs:
                log = snapshot.logs[0]
                lines.append(f"log of rank {log.rank} ({log.path}):")
                lines += [f"  {line}" for line in log.lines[-_LOG_LINES_SHOWN:]]
        if snapshot.goodput is not None:
            lines += goodput_lines(snapshot.goodput)
        for line in lines:
            self._print(line)

    def _tell_happenings(self, snapshot: Snapshot) -> None:
        new = [happening for happening in snapshot.happenings if happening.number >= self._next_number]
        if new:
            self._next_number = new[-1].number + 1
        self._checkpoints += [happening for happening in new if happening.kind == "checkpoint_committed"]
        worth = [
            happening for happening in new if happening.level != "detail" and happening.kind != "checkpoint_committed"
        ]
        for happening in worth[:_LINES_A_REFRESH]:
            self._print(f"[{stamp(snapshot, happening)}] {happening.sentence}")
        if len(worth) > _LINES_A_REFRESH:
            self._print(f"… and {count(len(worth) - _LINES_A_REFRESH)} more events, in events.jsonl")

    def _tell_progress(self, snapshot: Snapshot) -> None:
        words = progress(snapshot)
        if words and snapshot.step != self._told_step:
            self._told_step = snapshot.step
            loss = snapshot.series.get("loss") or next((s for s in snapshot.series.values() if s.rank == 0), None)
            value = f", {plain(loss.name, 60)} {loss.latest}" if loss else ""
            self._print(f"[{clock_text(snapshot.elapsed_seconds)}] {words}{value}")
        if self._checkpoints:
            newest = self._checkpoints[-1]
            before = f"; {count(len(self._checkpoints) - 1)} more before it" if len(self._checkpoints) > 1 else ""
            self._print(f"[{stamp(snapshot, newest)}] {newest.sentence}{before}")
            self._checkpoints = []

    def _print(self, line: str) -> None:
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"  # streams of notebooks may have none
        self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        self._stream.flush()
