"""The life of a worker: the user's function is called for one generation, and perhaps again for the next.

A call without a result (it raised, or the agent gave it up) is cleared up after, and the process parks until the agent
says what to begin anew as. One that cannot be cleared up after leaves, and another takes its place.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import signal
import sys
from typing import Any, NoReturn

from sgpu import settings
from sgpu.contract import failpoint, process
from sgpu.contract.heartbeat import Page
from sgpu.contract.outcome import Outcome
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, read_spec
from sgpu.worker import bootstrap, clearing
from sgpu.worker.abort import abort_here
from sgpu.worker.control import Control, answer_only
from sgpu.worker.pristine import Pristine

_STATUS = {"result": 0, "preempted": 3}


def run_worker(root: pathlib.Path, rank: int, generation: int, control: int | None = None) -> NoReturn:
    """Calls the run's function as `rank` of `generation`; each outcome goes to the run folder.

    Args:
        control: the pipe over which the agent speaks; None: this process is for one generation.

    Raises:
        SystemExit: always; 0 where there is a result, 1 where there is an exception, 3 where the run was preempted.
    """
    run = RunDir(root)
    spec = read_spec(run)
    bootstrap.prepare(spec)
    if control is None or not spec.restarts.in_process or spec.restarts.max_restarts == 0:
        if control is not None:
            answer_only(control, Page(run.node(settings.node()).heartbeat).slot(rank))
        outcome = _Generation(run, spec, rank, generation, None).outcome()
        raise SystemExit(_STATUS.get(outcome.kind, 1) if outcome is not None else 1)
    agent = Control(control, generation, abort=abort_here(), leave=lambda: os._exit(0))
    pristine = Pristine()
    while True:
        outcome = _Generation(run, spec, rank, generation, agent).outcome()
        if outcome is not None and outcome.kind != "exception":
            raise SystemExit(_STATUS.get(outcome.kind, 1))
        slot = Page(run.node(settings.node()).heartbeat).slot(rank)
        slot.fail(parked=False)
        reason = _cleared(run, pristine)
        if reason is not None:
            print(f"sgpu: this process is not used again, another takes its place: {reason}", flush=True)
            raise SystemExit(1)
        slot.fail(parked=True)
        told = agent.next()
        if told is None:
            raise SystemExit(1)
        rank, generation = told["rank"], told["generation"]
        _begin_anew(told)


class _Generation:
    """One call, watched from outside."""

    def __init__(self, run: RunDir, spec: RunSpec, rank: int, generation: int, control: Control | None) -> None:
        self._run, self._spec, self._rank, self._generation, self._control = run, spec, rank, generation, control

    def outcome(self) -> Outcome | None:
        """What came of it, written; None where the agent gave it up."""
        run, rank, generation, control = self._run, self._rank, self._generation, self._control
        slot = Page(run.node(settings.node()).heartbeat).slot(rank)
        if control is not None:
            control.begin(slot)
        with (run.attempt(generation, rank) / "stacks").open("wb") as stacks:
            faulthandler.enable(stacks, all_threads=True)
            faulthandler.register(signal.SIGUSR2, stacks, all_threads=True, chain=False)
            slot.start(generation)  # from here on the supervisor may ask for stacks
            outcome = bootstrap.call(run, self._spec, slot, rank, generation, control=control)
            stays = control is not None and (outcome is None or outcome.kind == "exception")
            if control is not None:
                control.out(done=not stays)
                outcome = None if control.over else outcome
            if outcome is not None:
                outcome.write(run)
            if not stays:
                slot.finish()
                bootstrap.leave_group(outcome.kind if outcome is not None else "")
            faulthandler.unregister(signal.SIGUSR2)
            faulthandler.disable()
        return outcome


def _cleared(run: RunDir, pristine: Pristine) -> str | None:
    """Clears up; why this process cannot be used again, if so."""
    try:
        clearing.clear_up()
        clearing.check_health()
    except clearing.NotHealthyError as error:
        return str(error)
    pristine.restore(run.code)
    return pristine.lost()


def _begin_anew(told: dict[str, Any]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    settings.adopt(told["environment"])
    process.begin_anew()
    failpoint.reset()
