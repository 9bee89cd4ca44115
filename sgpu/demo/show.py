"""Runs the demo: one run with a worker killed in the middle, one undisturbed, and the comparison."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sgpu import settings
from sgpu.contract.heartbeat import Page
from sgpu.contract.rundir import RunDir
from sgpu.decorator import DistributedFunction, distributed
from sgpu.demo import evidence, volume
from sgpu.demo.curve import curve
from sgpu.run import Run

_EPOCHS = 5
_WORLD = 2
_VICTIM = 1
_RUN_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that has to be so."""

    claim: str
    holds: bool
    found: str


@dataclass(frozen=True, kw_only=True)
class Done:
    """A run of the demo that has ended."""

    run: Run
    results: list[dict[str, Any]]
    lines: dict[int, list[dict[str, Any]]]
    killed_at: float | None


def main(console: Console | None = None) -> int:
    """Runs all and tells it; 0 where every claim holds, else 1."""
    console = console or Console()
    home = settings.home() / "demo"
    started = time.time()
    console.rule("sgpu demo: train, kill, resume, compare")
    files = volume.make(home / "volume")
    console.print(f"volume: {files:,} JPEG files of handwritten digits in {home / 'volume'}")
    names = [str(path.relative_to(home / "volume")) for path in (home / "volume").glob("*/*.jpg")]
    with _bars(console) as bars:
        disturbed = _run(bars, home / "evidence", "with a worker killed", names, kill=True)
        undisturbed = _run(bars, home / "evidence", "undisturbed", names, kill=False)
    checks = _report(console, disturbed, undisturbed, names)
    console.print(f"all of it took {time.time() - started:.0f} s")
    return 0 if all(check.holds for check in checks) else 1


def _bars(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
        TextColumn("{task.fields[state]}"), TimeElapsedColumn(), console=console,
    )  # fmt: skip


def _function(name: str) -> DistributedFunction:
    from sgpu.demo.train import train

    return distributed(gpus=_WORLD, name=name)(train)


def _run(bars: Progress, folder: pathlib.Path, title: str, names: Sequence[str], *, kill: bool) -> Done:
    """One run, followed by a bar; where `kill`, rank 1 gets a SIGKILL after two fifths of the steps."""
    ledger = folder / ("killed" if kill else "undisturbed")
    shutil.rmtree(ledger, ignore_errors=True)
    ledger.mkdir(parents=True)
    total = _EPOCHS * -(-len(names) // (32 * _WORLD))
    bar = bars.add_task(title, total=total, state="starting")
    run = _function(f"demo-{ledger.name}").submit(str(settings.home() / "demo" / "volume"), str(ledger), _EPOCHS)
    killed: list[float] = []

    def follow() -> None:
        status = run.status
        bars.update(bar, completed=status.step, state=status.state.lower() + (" (killed rank 1)" if killed else ""))
        if kill and not killed and _kill_at(run, total * 2 // 5):
            killed.append(time.time())

    try:
        run.wait(_RUN_SECONDS, each_turn=follow)
    except BaseException:
        run.cancel()
        raise
    follow()
    results = run.result()
    return Done(run=run, results=results, lines=evidence.read(ledger), killed_at=killed[0] if killed else None)


def _kill_at(run: Run, step: int) -> bool:
    """Sends SIGKILL to the victim once it has completed `step`; tells whether it did."""
    page_path = RunDir(pathlib.Path(run.path)).heartbeat
    if not page_path.exists():
        return False
    page = Page(page_path)
    beat = page.slot(_VICTIM).read()
    page.close()
    if beat.step < step or not beat.pid:
        return False
    os.kill(beat.pid, signal.SIGKILL)
    return True


def _report(console: Console, disturbed: Done, undisturbed: Done, names: Sequence[str]) -> list[Check]:
    losses = [value for _, value in disturbed.run.metrics("loss")]
    console.print("\nloss of the run whose worker was killed:")
    for row in curve(losses, width=min(72, console.width - 10)):
        console.print(row, highlight=False, markup=False)
    proof = evidence.judge(disturbed.lines, files=names, epochs=_EPOCHS)
    other = evidence.judge(undisturbed.lines, files=names, epochs=_EPOCHS)
    checks = _checks(disturbed, undisturbed, proof, other)
    table = Table("claim", "", "found")
    for check in checks:
        table.add_row(check.claim, "[green]yes[/]" if check.holds else "[red]NO[/]", check.found)
    console.print(table)
    figures = Table("figure", "with a kill", "undisturbed")
    for title, figure in _FIGURES:
        figures.add_row(title, figure(disturbed), figure(undisturbed))
    console.print(figures)
    _tell_places(console, disturbed.run)
    return checks


def _checks(disturbed: Done, undisturbed: Done, proof: evidence.Evidence, other: evidence.Evidence) -> list[Check]:
    pairs = list(zip(disturbed.results, undisturbed.results, strict=True))
    restarts = disturbed.run.status.restarts
    if disturbed.killed_at is not None and proof.resumed_at is not None:
        seconds = proof.resumed_at - disturbed.killed_at
        resumed = f"{seconds:.2f} s from SIGKILL to the next trained step of both ranks; {proof.again} steps done again"
    else:
        resumed = "the kill did not happen, or nothing was trained after it"
    return [
        Check(
            claim="the killed worker was replaced, once",
            holds=disturbed.killed_at is not None and restarts == 1 and proof.resumed_at is not None,
            found=resumed,
        ),
        *(
            Check(
                claim=f"every sample of every epoch was trained exactly once ({title})",
                holds=found.exactly_once,
                found=f"{found.epochs} epochs, {found.steps} steps: {found.missing} missing, "
                f"{found.repeated} repeated, {found.differing} done again with other files",
            )
            for title, found in (("kill", proof), ("undisturbed", other))
        ),
        Check(
            claim="the final weights are equal to the bit",
            holds=all(killed["hash"] == other["hash"] for killed, other in pairs),
            found="SHA-256 of weights, buffers and optimizer state, rank by rank: "
            + ", ".join(f"{killed['hash'][:12]} / {other['hash'][:12]}" for killed, other in pairs),
        ),
    ]


def _fetch(done: Done) -> str:
    seconds = sorted(value for _, value in done.run.metrics("fetch_seconds"))
    p99 = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
    return f"{statistics.fmean(seconds) * 1e3:.2f} ms mean, {p99 * 1e3:.2f} ms p99"


def _blocked(done: Done) -> str:
    saves = [event for event in done.run.events() if event["kind"] == "checkpoint_committed"]
    return f"{sum(event['blocked_seconds'] for event in saves):.3f} s in {len(saves)} checkpoints"


def _goodput(done: Done) -> str:
    report = done.run.goodput()
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in report.seconds.items() if seconds >= 0.05)
    return f"{report.goodput:.1%} (seconds of both ranks: {parts})"


_FIGURES: list[tuple[str, Callable[[Done], str]]] = [
    ("loss at the end", lambda done: f"{done.results[0]['loss']:.4f}"),
    ("waited for data (fetch_seconds)", _fetch),
    ("blocked by checkpoints", _blocked),
    ("goodput", _goodput),
]


def _tell_places(console: Console, run: Run) -> None:
    console.print(f"run folder: {run.path}", highlight=False)
    kept = pathlib.Path(RunDir(pathlib.Path(run.path)).mlflow)
    if not kept.exists():
        console.print(f"MLflow: nothing was kept; see {RunDir(pathlib.Path(run.path)).forwarder_log}")
        return
    where = json.loads(kept.read_text())
    console.print(f"MLflow run {where['run_id']} in {where['tracking_uri']}; open it with:", highlight=False)
    console.print(f"  {where['open_command']}", highlight=False, markup=False, soft_wrap=True)
