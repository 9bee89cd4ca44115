"""`sgpu`: what a notebook shows, from a shell. `main` is the console script."""

from __future__ import annotations

import typer

import sgpu
from sgpu.cli import cache, checkpoints, doctor, plan, runs, start
from sgpu.cli.screen import Told

app = typer.Typer(
    cls=Told,
    help="Train on many GPUs from a notebook; machines fail, the run does not.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("runs")(runs.list_runs)
app.command("show")(runs.show)
app.command("logs")(runs.logs)
app.command("cancel")(runs.cancel)
app.command("resume")(runs.resume)
app.command("cleanup")(runs.cleanup)
app.add_typer(checkpoints.app, name="checkpoints")
app.add_typer(cache.app, name="cache")
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("agent")(start.agent)
app.command("demo")(start.demo)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"sgpu {sgpu.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print it and end."),
) -> None:
    """Train on many GPUs from a notebook; machines fail, the run does not."""


def main() -> None:
    """Exit status: 0 done, 1 it failed, 2 it was asked wrongly."""
    app()
