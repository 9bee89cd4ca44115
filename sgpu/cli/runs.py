"""Runs of this home: list, logs, cancel, resume, cleanup."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import typer

from sgpu import run as run_module
from sgpu import settings
from sgpu.cli import screen
from sgpu.contract import process
from sgpu.contract.errors import CheckpointNotFoundError, InputError, SgpuError
from sgpu.contract.exits import exit_code
from sgpu.contract.heartbeat import Page, WorkerState
from sgpu.contract.rundir import RunDir, runs_folder
from sgpu.endings import why_lost
from sgpu.run import Run

_AT_WORK = (WorkerState.STARTING, WorkerState.TRAINING)
_MOST_RANKS = 32
ID = typer.Argument(help="A run's id, the start or end of it where that is enough, or its folder.")


def list_runs(
    limit: int = typer.Option(20, "--limit", "-n", min=1, help="The newest so many."),
) -> None:
    """Lists runs, newest first."""
    found = run_module.runs()
    if not found:
        typer.echo(f"no runs in {runs_folder(settings.home())}")
        return
    shown = screen.table("id", "state", "step", "workers", "restarts", "started", "took", right=("step", "restarts"))
    for run in found[:limit]:
        shown.add_row(run.id, *_row(run))
    screen.console().print(shown)
    if len(found) > limit:
        typer.echo(f"{len(found) - limit} older; --limit shows more")


def _row(run: Run, word: str = "") -> tuple[str, ...]:
    try:
        spec, status = run.spec, run.status
    except (SgpuError, ValueError, TypeError, KeyError) as error:  # a folder that is damaged, or no run of this version
        return ("UNREADABLE", "", "", "", "", " ".join(str(error).split())[:120])
    step = f"{status.step}/{status.total_steps}" if status.total_steps is not None else str(status.step)
    started = status.started or spec.created
    took = (status.ended or (status.updated if status.final else time.time())) - started
    workers = f"{spec.world_size} {'GPU' if spec.accelerator == 'cuda' else 'CPU'}{word}"
    workers += f" on {spec.nodes} nodes" if spec.nodes > 1 else ""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(started))
    return (status.state, step, workers, str(status.restarts), when, screen.in_time(max(took, 0.0)))


def show(run_id: str = ID) -> None:
    """Tells where one run stands: its state, its nodes, what each rank does, what ended it, and what to do next."""
    run = Run.open(run_id)
    spec, status = run.spec, run.status
    state, step, workers, restarts, when, took = _row(run, " workers")
    typer.echo(f"{run.id}: {state} at step {step}, after {took}, {restarts} restarts, since {when}; {workers}")
    if status.failure is not None:
        typer.echo(f"cause: {_cause(status.failure)}")
    elif state == "LOST":
        typer.echo(f"cause: its supervisor vanished; {why_lost(RunDir(pathlib.Path(run.path)))}")
    if status.nodes:
        shown = screen.table("node", "state", "address", "ranks")
        for each in status.nodes:
            ranks = spec.ranks_of(each.node)
            told = f"{ranks.start} to {ranks.stop - 1}" if len(ranks) > 1 else str(ranks.start) if ranks else "spare"
            shown.add_row(str(each.node), "" if status.final else each.state, each.address or "", told)
        screen.console().print(shown)
    if not status.final:
        _show_ranks(RunDir(pathlib.Path(run.path)))
    typer.echo(f"folder: {run.path}")
    if status.final and state != "SUCCEEDED":
        typer.echo(f"next: `sgpu logs {run.id}` shows what it printed, `sgpu resume {run.id}` goes on")


def _show_ranks(folder: RunDir) -> None:
    """The process of each rank, for a debugger, and what it is in; of many, those that are longest in it."""
    try:
        beats = dict(enumerate(Page(folder.heartbeat).beats()))
    except (FileNotFoundError, ValueError):  # not yet there; or of another version
        return
    longest = sorted(beats, key=lambda rank: beats[rank].section_since_ns)[:_MOST_RANKS]
    shown = screen.table("rank", "pid", "step", "state", "in", "for", right=("rank", "pid", "step"))
    for rank in sorted(longest):
        beat = beats[rank]
        spent_seconds = max(time.monotonic_ns() - beat.section_since_ns, 0) / 1e9
        within = beat.section_name or beat.section.name.lower()
        row = (within, screen.in_time(spent_seconds)) if beat.state in _AT_WORK else ("", "")
        shown.add_row(str(rank), str(beat.pid or ""), str(beat.step), beat.state.name.lower(), *row)
    screen.console().print(shown)
    if len(beats) > len(longest):
        typer.echo(f"{len(beats) - len(longest)} more ranks, for less long in what they do")


def _cause(failure: Mapping[str, Any]) -> str:
    """An exception with its type and rank: the text of a KeyError alone tells nothing."""
    message, cause = str(failure.get("message") or ""), str(failure.get("cause"))
    if failure.get("kind") != "exception":
        return message or cause
    return f"rank {failure.get('rank')} raised {cause}" + (f": {message}" if message else "")


def logs(
    run_id: str = ID,
    rank: int | None = typer.Option(None, "--rank", "-r", help="Of this rank alone; all ranks otherwise."),
) -> None:
    """Prints what the ranks printed, over all restarts."""
    run = Run.open(run_id)
    world = run.spec.world_size
    if rank is not None and not 0 <= rank < world:
        raise InputError(f"--rank must be 0 to {world - 1} for run {run.id}; found {rank}")
    typer.echo(run.logs(rank), nl=False)


def cancel(run_id: str = ID) -> None:
    """Ends every process of a run; a training loop saves a checkpoint first if it can within seconds."""
    run = Run.open(run_id)
    before = run.state
    run.cancel()
    after = run.state
    if before == after:
        typer.echo(f"run {run.id} had ended before: {after}")
    else:
        typer.echo(f"run {run.id}: {after} at step {run.status.step}")


def resume(
    run_id: str = ID,
    step: int | None = typer.Option(None, "--step", min=0, help="Of the checkpoint; an older one begins a new run."),
    wait: bool = typer.Option(False, "--wait", help="Come back when it has ended, with the exit status of its agent."),
) -> None:
    """Goes on with a run that ended without success, from its newest valid checkpoint or a chosen one."""
    former = Run.open(run_id)
    try:
        run = former.resume(step)
    except CheckpointNotFoundError as error:
        if step is None:
            raise
        raise InputError(str(error)) from error
    went = "goes on" if run.id == former.id else f"begins at step {step} of {former.id}"
    typer.echo(f"run {run.id} {went}; `sgpu logs {run.id}` shows what it prints")
    if not wait:
        return
    with _passing_signals_on(run):
        state = run.wait()
    typer.echo(f"run {run.id}: {state} at step {run.status.step}")
    if run.status.failure is not None:
        typer.echo(f"cause: {_cause(run.status.failure)}")
    raise typer.Exit(exit_code(run.status))


@contextlib.contextmanager
def _passing_signals_on(run: Run) -> Iterator[None]:
    """A scheduler that wants the machine back tells this command, and the run's agent has to know."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        agent = process.read_process(RunDir(pathlib.Path(run.path)).agent)
        if agent is not None:
            agent.signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def cleanup() -> None:
    """Ends and removes what dead runs left on this machine, and says what it was."""
    told = run_module.cleanup()
    for line in told:
        typer.echo(line)
    if not told:
        typer.echo("nothing was left")
