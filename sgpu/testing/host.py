"""A `WorkerHost` without processes: a test says, turn by turn, what its workers do."""

from __future__ import annotations

import os
import pathlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle

from sgpu.agent.workers import Exit, ZygoteLostError
from sgpu.contract.heartbeat import Page
from sgpu.contract.outcome import Kind, Outcome
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import NodeStatus
from sgpu.testing.clock import FakeClock

Turn = Callable[["ScriptedHost"], list[Exit]]
_IDLE_TURNS = 20_000


class ScriptedHost:
    """Does one turn of its script at each `wait`; without one, lets the time of `wait` pass.

    Attributes:
        calls: what the supervisor asked for, in order: ("store", name), ("start", name), ("begin anew", parked, name),
            ("signal", name, number), ("examine", name), ("interrupt", *names), ("end", *names), ("stop_all",),
            ("reopen",), ("begin", members), ("close",).
        generation: of the newest start.
        standing_still: names of workers that a signal has stopped.
        node_count, missing: how many nodes there are, and which of them are lost.
        importing: not ready to start anything yet.
        failing_starts: how many of the next `open_store` calls raise ZygoteLostError.
    """

    def __init__(self, run: RunDir, page: Page, clock: FakeClock, *turns: Turn) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.generation = -1
        self.failing_starts = 0
        self.node_count, self.missing = 1, set[int]()
        self.importing = False
        self.standing_still: set[str] = set()
        self.environments: dict[str, Mapping[str, str]] = {}
        self.run, self.page, self.clock = run, page, clock
        self._turns = deque(turns)
        self._idle = 0

    # ---- what the supervisor calls

    def open(self) -> None:
        self.calls.append(("open",))

    def reopen(self) -> None:
        self.calls.append(("reopen",))

    def ready(self) -> bool:
        return not self.importing and not self.missing

    def open_store(self, name: str) -> int:
        self.calls.append(("store", name))
        if self.failing_starts:
            self.failing_starts -= 1
            raise ZygoteLostError("the zygote ended (scripted)")
        return 1

    def start(
        self, name: str, *, rank: int, generation: int, environment: Mapping[str, str], log: pathlib.Path,
        parked: str | None = None,
    ) -> None:  # fmt: skip
        self.calls.append(("start", name) if parked is None else ("begin anew", parked, name))
        self.environments[name] = environment
        self.generation = generation
        self.page.slot(rank).start(generation, pid=os.getpid())

    def wait(self, seconds: float) -> list[Exit]:
        if self._turns:
            self._idle = 0
            return self._turns.popleft()(self)
        self._idle += 1
        if self._idle > _IDLE_TURNS:
            raise AssertionError(f"nothing ends this run; calls so far: {self.calls}")
        self.clock.advance(seconds)
        return []

    def signal(self, name: str, number: int) -> None:
        self.calls.append(("signal", name, number))

    def stopped(self, name: str) -> bool:
        return name in self.standing_still

    def examine(self, name: str, into: pathlib.Path) -> None:
        self.calls.append(("examine", name))

    def members(self) -> tuple[int, ...]:
        return () if self.importing else tuple(sorted(set(range(self.node_count)) - self.missing))

    def room(self, wanted: int) -> int:
        return wanted

    def begin(self, members: tuple[int, ...]) -> None:
        self.calls.append(("begin", members))

    def nodes(self) -> tuple[NodeStatus, ...]:
        return ()

    def interrupt(self, names: Sequence[str], generation: int) -> None:
        self.calls.append(("interrupt", *names))

    def end(self, names: Sequence[str], seconds: float) -> None:
        self.calls.append(("end", *names))

    def stop_all(self, seconds: float) -> None:
        self.calls.append(("stop_all",))

    def close(self) -> None:
        self.calls.append(("close",))

    # ---- what a rank does, for turns

    def outcome(self, rank: int, kind: Kind = "result", *, step: int = 0, **facts: Any) -> None:
        """The rank writes its outcome and says that it is done; its process lives on."""
        self.run.attempt(self.generation, rank).mkdir(parents=True, exist_ok=True)
        if kind == "result":
            facts.setdefault("result", cloudpickle.dumps(rank))
        Outcome(kind=kind, rank=rank, generation=self.generation, step=step, time=self.clock.wall(), **facts).write(
            self.run
        )
        self.page.slot(rank).finish()

    def exited(self, rank: int, status: int = 0) -> Exit:
        """The rank's process has ended; `status` as os.waitpid gives it."""
        return Exit(name=f"rank{rank}.g{self.generation}", status=status)


def passes(seconds: float) -> Turn:
    """Nothing happens for so long."""

    def turn(host: ScriptedHost) -> list[Exit]:
        host.clock.advance(seconds)
        return []

    return turn


def steps(step: int, *ranks: int, seconds: float = 0.0) -> Turn:
    """The ranks complete a step, which took so long; 0: that is not known."""

    def turn(host: ScriptedHost) -> list[Exit]:
        for rank in ranks:
            host.page.slot(rank).beat(step, step_seconds=seconds)
        return []

    return turn


def returns(*ranks: int) -> Turn:
    """The ranks return a result and leave."""

    def turn(host: ScriptedHost) -> list[Exit]:
        for rank in ranks:
            host.outcome(rank)
        return [host.exited(rank) for rank in ranks]

    return turn


def raises(rank: int, exception_type: str = "ValueError", message: str = "boom", **facts: Any) -> Turn:
    """The rank's function raises; facts are those of `Outcome`."""

    def turn(host: ScriptedHost) -> list[Exit]:
        host.outcome(rank, "exception", exception_type=exception_type, message=message, **facts)
        return [host.exited(rank, 1 << 8)]

    return turn


def fails(rank: int, exception_type: str = "ValueError", message: str = "boom", **facts: Any) -> Turn:
    """The rank's function raises, and its process clears up after it."""

    def turn(host: ScriptedHost) -> list[Exit]:
        host.outcome(rank, "exception", exception_type=exception_type, message=message, **facts)
        host.page.slot(rank).fail(parked=False)
        return []

    return turn


def hears(*ranks: int) -> Turn:
    """The ranks have been told to give up their calls, and a thread of theirs has heard it."""

    def turn(host: ScriptedHost) -> list[Exit]:
        for rank in ranks:
            host.page.slot(rank).hear(host.generation)
        return []

    return turn


def parks(*ranks: int) -> Turn:
    """The ranks have given up their calls, and wait to begin anew."""

    def turn(host: ScriptedHost) -> list[Exit]:
        for rank in ranks:
            host.page.slot(rank).fail(parked=True)
        return []

    return turn


def dies(rank: int, status: int) -> Turn:
    """The rank's process ends without an outcome."""
    return lambda host: [host.exited(rank, status)]


def loses_zygote(host: ScriptedHost) -> list[Exit]:
    """The process that workers are forked from ends."""
    raise ZygoteLostError("the zygote ended (scripted)")


def loses_store(host: ScriptedHost) -> list[Exit]:
    """The process of the rendezvous store ends."""
    return [Exit(name=f"store{host.generation}", status=9)]
