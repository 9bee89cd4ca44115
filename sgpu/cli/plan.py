"""`sgpu plan`: how much of a job's time becomes training, and which knob matters most."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import typer

from sgpu.cli import screen
from sgpu.contract.errors import InputError
from sgpu.goodput import expected_failures, expected_goodput, failures_band, mtbf_seconds, optimal_interval_seconds

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job's figures.

    Attributes:
        mtbf_seconds: mean time between failures of the whole job.
        stall_seconds: how long a checkpoint stops training.
        durable_seconds: from then until it can be restored.
        detection_seconds: from a failure until it is noticed.
        restart_seconds: from then until the first new step.
    """

    mtbf_seconds: float
    stall_seconds: float
    durable_seconds: float
    detection_seconds: float
    restart_seconds: float

    def goodput(self, interval_seconds: float) -> float:
        """The expected share of wall time that is kept, 0 to 0.999, by the exact form."""
        return expected_goodput(
            interval_seconds, self.mtbf_seconds, stall_seconds=self.stall_seconds,
            durable_seconds=self.durable_seconds, detection_seconds=self.detection_seconds,
            restart_seconds=self.restart_seconds,
        )  # fmt: skip

    def best_interval_seconds(self) -> float:
        """Daly's; at least a second, where a checkpoint costs nothing."""
        return max(1.0, optimal_interval_seconds(self.stall_seconds, self.mtbf_seconds, form="daly"))


def knobs(job: Job, interval_seconds: float) -> list[tuple[float, str]]:
    """Goodput won by halving each cost (and doubling the MTBF), the largest first."""
    now = job.goodput(interval_seconds)
    changed = {
        "checkpoint stall": replace(job, stall_seconds=job.stall_seconds / 2),
        "time until durable": replace(job, durable_seconds=job.durable_seconds / 2),
        "detection": replace(job, detection_seconds=job.detection_seconds / 2),
        "restart": replace(job, restart_seconds=job.restart_seconds / 2),
        "failures": replace(job, mtbf_seconds=job.mtbf_seconds * 2),
    }
    won = [(other.goodput(interval_seconds) - now, name) for name, other in changed.items()]
    won.append((job.goodput(interval_seconds / 2) - now, "checkpoint interval"))
    return sorted(won, reverse=True)


def plan(
    gpus: int = typer.Option(8, "--gpus", min=1, help="How many run."),
    days: float = typer.Option(30.0, "--days", help="For how long."),
    yearly: float = typer.Option(
        0.01, "--yearly", help="Chance that one GPU fails within a year: 0.01 for GPU parts on a good day."
    ),
    failures_a_day: float | None = typer.Option(
        None, "--failures-a-day", help="Of the whole job, where it was measured; beats --yearly."
    ),
    interval: float | None = typer.Option(
        None, "--interval", help="Seconds of training between checkpoints; the best one otherwise."
    ),
    stall: float = typer.Option(1.0, "--stall", help="Seconds that a checkpoint stops training."),
    durable: float = typer.Option(60.0, "--durable", help="Seconds from then until it can be restored."),
    detection: float = typer.Option(30.0, "--detection", help="Seconds until a failure is noticed."),
    restart: float = typer.Option(30.0, "--restart", help="Seconds from then until the first new step."),
    price: float | None = typer.Option(None, "--price", help="Money a GPU hour; shows what is lost."),
) -> None:
    """Shows the odds of a failure, the best checkpoint interval, and the goodput to expect."""
    failures, mtbf = _failures(gpus, days, yearly, failures_a_day)
    if mtbf is None:
        raise InputError("without failures there is nothing to plan; give --yearly or --failures-a-day above 0")
    job = Job(
        mtbf_seconds=mtbf, stall_seconds=stall, durable_seconds=durable, detection_seconds=detection,
        restart_seconds=restart,
    )  # fmt: skip
    if price is not None and not 0 <= price < math.inf:
        raise InputError(f"--price must be 0 or more; found {price:g}")
    chosen = interval if interval is not None else job.best_interval_seconds()
    share = job.goodput(chosen)
    low, high = failures_band(failures)
    lost_hours = gpus * days * 24 * (1 - share)
    typer.echo(f"{gpus} GPUs for {days:g} days")
    typer.echo(f"chance of at least one failure: {-math.expm1(-failures):.1%}")
    typer.echo(f"failures: {failures:.3g} expected, {low} to {high} in 9 cases of 10")
    typer.echo(f"time between failures: {screen.in_time(mtbf)}")
    typer.echo(f"best checkpoint interval: {screen.in_time(job.best_interval_seconds())}")
    typer.echo(f"goodput at {screen.in_time(chosen)}: {share:.1%}")
    money = f", {lost_hours * price:,.0f} of money" if price is not None else ""
    typer.echo(f"lost: {lost_hours:,.1f} GPU hours of {gpus * days * 24:,.0f}{money}\n")
    shown = screen.table("interval", "goodput", right=("interval", "goodput"))
    for factor in _FACTORS:
        shown.add_row(screen.in_time(chosen * factor), f"{job.goodput(chosen * factor):.1%}")
    screen.console().print(shown)
    won, name = knobs(job, chosen)[0]
    if won >= 0.0005:
        typer.echo(f"\nhalving one of them helps most for: {name} (+{won:.1%})")
    typer.echo("\nfailures are assumed to be independent; real ones come in bursts")


def _failures(gpus: int, days: float, yearly: float, failures_a_day: float | None) -> tuple[float, float | None]:
    """Expected failures in all, and seconds between them (None: there are none)."""
    if not 0 < days < math.inf:
        raise InputError(f"--days must be above 0; found {days:g}")
    if failures_a_day is not None:
        return failures_a_day * days, mtbf_seconds(failures_a_day)
    expected = expected_failures(gpus, days, yearly)
    return expected, mtbf_seconds(expected / days) if expected > 0 else None
