"""Commands that start something: an agent, the demo."""

from __future__ import annotations

import os
import pathlib
import sys

import typer

from sgpu import resuming
from sgpu.contract.errors import InputError
from sgpu.contract.rundir import RunDir


def agent(
    run_dir: pathlib.Path = typer.Argument(help="The run's folder, as the launcher made it."),
    node: int | None = typer.Option(
        None, "--node", min=0, help="Of a run on several; the first, 0, controls it. Simulated ones: all, if not given."
    ),
    address: str = typer.Option("", "--address", help="This node's IPv4 address; found out otherwise."),
) -> None:
    """Supervises a run on this node to its end: what a scheduler starts, once a node.

    Exit status: 0 succeeded, 1 failed, 2 cancelled or refused, 3 would fail again, 69 the machines failed, 75 was told
    to go and has saved; of the other nodes: 0 the run has ended, 1 the first one was lost. Started again after 69 or
    75, the same command goes on.
    """
    run = RunDir(run_dir.absolute())
    for needed in (run.spec, run.payload):
        if not needed.exists():
            raise InputError(f"no run at {run.root}: it has no {needed.name}; give the folder of a run")
    command = [sys.executable, "-m", "sgpu.agent", str(run.root), "--node", str(node or 0)]
    if address:
        command += ["--address", address]
    elif node is None:
        command = resuming.start_other_nodes(run) or command
    sys.stdout.flush()
    # In place of this process, so that the scheduler's signals reach the supervisor.
    os.execv(command[0], command)


def demo() -> None:
    """The whole path on this machine, with a worker killed in the middle, and proof of what came of it."""
    try:
        from sgpu.demo.show import main  # loads torch
    except ImportError as error:
        raise InputError(f"the demo needs {error.name}; install it with: pip install 'sgpu[demo]'") from error
    raise typer.Exit(int(main() or 0))
