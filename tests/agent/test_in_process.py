"""Workers that go on in their processes after a failure, as the supervisor arranges it: scripted, turn by turn."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sgpu.agent.supervising.supervisor import Supervisor
from sgpu.agent.workers import NodeLostError
from sgpu.contract.events import emit
from sgpu.contract.heartbeat import Page, WorkerState
from sgpu.contract.policies import RestartPolicy
from sgpu.contract.records import read_all
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.contract.status import Status
from sgpu.testing.clock import FakeClock
from sgpu.testing.host import (
    ScriptedHost,
    Turn,
    dies,
    fails,
    hears,
    loses_store,
    loses_zygote,
    parks,
    passes,
    returns,
    steps,
)

_SIGKILL = 9


class Bench:
    def __init__(self, folder: pathlib.Path, *, world_size: int = 2, **facts: Any) -> None:
        self.run = RunDir(folder / "run")
        self.run.create()
        self.spec = dataclasses.replace(
            RunSpec(
                id="run", name="train", created=0.0, backend="local", world_size=world_size,
                gpus_per_node=world_size, accelerator="cpu", seed=1, tracking=Tracking(uri="", experiment=""),
                python="", working_dir="/",
            ),
            **facts,
        )  # fmt: skip
        self.page = Page.create(self.run.heartbeat, world_size)
        self.clock = FakeClock()
        self.host = ScriptedHost(self.run, self.page, self.clock)
        self.asked: str | None = None

    def supervise(self, *turns: Turn) -> Status:
        self.host._turns.extend(turns)
        return Supervisor(
            self.run, self.spec, host=self.host, page=self.page, clock=self.clock, stop_reason=lambda: self.asked
        ).supervise()

    def started(self, generation: int) -> list[tuple[Any, ...]]:
        """How each worker of a generation came to be: anew, or out of which parked one."""
        end = f".g{generation}"
        return [c for c in self.host.calls if c[0] in ("start", "begin anew") and c[-1].endswith(end)]

    def kept(self) -> list[list[int]]:
        return [event["kept"] for event in read_all(self.run.events) if event["kind"] == "restarting"]

    def commits(self, step: int) -> Turn:
        def turn(host: ScriptedHost) -> list[Any]:
            emit(self.run, "checkpoint_committed", generation=host.generation, rank=0, step=step)
            return []

        return turn

    def asks(self, reason: str) -> Turn:
        def turn(_host: ScriptedHost) -> list[Any]:
            self.asked = reason
            return []

        return turn


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Callable[..., Bench]:
    return lambda **facts: Bench(tmp_path, **facts)


def test_after_an_exception_all_go_on(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(
        steps(3, 0, 1), fails(1, step=3), parks(1), parks(0), steps(4, 0, 1), returns(0, 1)
    )  # fmt: skip
    assert (status.state, status.restarts, status.generation) == ("SUCCEEDED", 1, 1)
    assert run.started(1) == [("begin anew", "rank0.g0", "rank0.g1"), ("begin anew", "rank1.g0", "rank1.g1")]
    assert run.kept() == [[0, 1]]
    calls = run.host.calls
    assert calls.index(("interrupt", "rank0.g0", "rank1.g0")) < calls.index(("end", "store0"))
    assert calls.index(("end", "store0")) < calls.index(("store", "store1"))
    assert ("stop_all",) not in calls[: calls.index(("store", "store1"))]
    assert run.host.environments["rank1.g1"]["SGPU_GENERATION"] == "1"


@pytest.mark.parametrize("dead", [0, 1])
def test_only_the_dead_is_replaced(bench: Callable[..., Bench], dead: int) -> None:
    """Rank 0 is one like any other."""
    run = bench()
    alive = 1 - dead
    status = run.supervise(steps(3, 0, 1), dies(dead, _SIGKILL), parks(alive), steps(4, 0, 1), returns(0, 1))
    assert (status.state, status.restarts) == ("SUCCEEDED", 1)
    assert sorted(run.started(1)) == [
        ("begin anew", f"rank{alive}.g0", f"rank{alive}.g1"), ("start", f"rank{dead}.g1")
    ]  # fmt: skip
    assert run.kept() == [[alive]]


def test_a_rank_that_does_not_leave_its_call_is_ended_alone(bench: Callable[..., Bench]) -> None:
    run = bench(world_size=3)
    status = run.supervise(
        steps(3, 0, 1, 2), fails(1, step=3), hears(0, 2), parks(0, 1), passes(3), passes(3), steps(4, 0, 1, 2),
        returns(0, 1, 2),
    )  # fmt: skip
    assert (status.state, status.restarts) == ("SUCCEEDED", 1)
    assert ("end", "rank2.g0") in run.host.calls
    assert run.kept() == [[0, 1]]
    assert run.started(1)[-1] == ("start", "rank2.g1")


def test_a_rank_that_cannot_even_hear_is_not_waited_for(bench: Callable[..., Bench]) -> None:
    """It holds the interpreter's lock."""
    run = bench()
    before = run.clock.monotonic()
    run.supervise(steps(3, 0, 1), fails(1, step=3), parks(1), passes(1.1), steps(4, 0, 1), returns(0, 1))
    assert run.kept() == [[1]]
    assert run.clock.monotonic() - before < 3


def test_a_rank_that_has_heard_is_given_time(bench: Callable[..., Bench]) -> None:
    run = bench()
    run.supervise(
        steps(3, 0, 1), fails(1, step=3), parks(1), hears(0), passes(4), parks(0), steps(4, 0, 1), returns(0, 1)
    )
    assert run.kept() == [[0, 1]]


def test_a_rank_that_still_clears_up_gets_more_time(bench: Callable[..., Bench]) -> None:
    run = bench()
    run.supervise(
        steps(3, 0, 1), fails(1, step=3), parks(0), passes(5), passes(5), parks(1), steps(4, 0, 1), returns(0, 1)
    )
    assert run.kept() == [[0, 1]]


def test_a_stopped_rank_is_not_waited_for(bench: Callable[..., Bench]) -> None:
    run = bench()
    run.host.standing_still.add("rank1.g0")
    before = run.clock.monotonic()
    run.supervise(steps(3, 0, 1), fails(0, step=3), parks(0), passes(0.1), steps(4, 0, 1), returns(0, 1))
    assert run.clock.monotonic() - before < 2
    assert run.kept() == [[0]]


def test_what_is_carried_along_is_suspected_after_two_restarts_without_progress(bench: Callable[..., Bench]) -> None:
    run = bench(restarts=RestartPolicy(max_restarts=10, backoff_seconds=0.0))

    def failing(step: int) -> list[Turn]:
        return [steps(step, 0, 1), fails(1, step=step)]

    status = run.supervise(
        *failing(3), parks(0, 1), *failing(4), parks(0, 1), *failing(5), run.commits(5), *failing(7), parks(0, 1),
        steps(8, 0, 1), returns(0, 1),
    )  # fmt: skip
    assert (status.state, status.restarts) == ("SUCCEEDED", 4)
    assert run.kept() == [[0, 1], [0, 1], [], [0, 1]], "fresh processes after two; progress trusts them again"
    assert run.started(3) == [("start", "rank0.g3"), ("start", "rank1.g3")]


def test_what_fails_in_its_set_up_after_it_was_kept_gets_fresh_processes(bench: Callable[..., Bench]) -> None:
    """A module that cannot be imported twice, say: another attempt of the same kind would end the run."""
    run = bench(restarts=RestartPolicy(backoff_seconds=0.0))
    status = run.supervise(
        steps(3, 0, 1), run.commits(2), fails(1, step=3), parks(0, 1), fails(0, "RuntimeError", "twice"),
        steps(4, 0, 1), returns(0, 1),
    )  # fmt: skip
    assert (status.state, run.kept()) == ("SUCCEEDED", [[0, 1], []])


@pytest.mark.parametrize(
    ("policy", "facts"),
    [(RestartPolicy(in_process=False), {}), (RestartPolicy(max_restarts=0), {}),
     (RestartPolicy(), {"unrecoverable": True})],
)  # fmt: skip
def test_where_nobody_is_asked_to_park(
    bench: Callable[..., Bench], policy: RestartPolicy, facts: dict[str, Any]
) -> None:
    run = bench(restarts=policy)
    run.supervise(steps(3, 0, 1), fails(1, step=3, **facts), passes(0.1), steps(4, 0, 1), returns(0, 1))
    assert not [call for call in run.host.calls if call[0] in ("interrupt", "begin anew")]


def test_a_second_death_while_the_others_park(bench: Callable[..., Bench]) -> None:
    run = bench(world_size=3)
    status = run.supervise(
        steps(3, 0, 1, 2), dies(1, _SIGKILL), parks(0), dies(2, _SIGKILL), steps(4, 0, 1, 2), returns(0, 1, 2)
    )
    assert (status.state, status.restarts) == ("SUCCEEDED", 1)
    assert run.kept() == [[0]]


def test_a_failure_of_the_next_generation_is_one_like_others(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(
        steps(3, 0, 1), fails(1, step=3), parks(0, 1), dies(0, _SIGKILL), parks(1), passes(2), steps(4, 0, 1),
        returns(0, 1),
    )  # fmt: skip
    assert (status.state, status.restarts) == ("SUCCEEDED", 2)
    assert run.kept() == [[0, 1], [1]]
    assert ("begin anew", "rank1.g1", "rank1.g2") in run.host.calls


def test_cancelled_while_they_park(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(steps(3, 0, 1), fails(1, step=3), run.asks("cancel"))
    assert status.state == "CANCELLED"
    assert run.host.calls[-1] == ("stop_all",)
    assert run.started(1) == []


def test_the_same_error_at_the_same_step_ends_the_run_with_its_cause(bench: Callable[..., Bench]) -> None:
    run = bench()
    again = [steps(7, 0, 1), fails(1, "KeyError", "'x'", step=7), parks(0, 1)]
    status = run.supervise(*again, *again)
    assert status.failure is not None
    assert (status.failure["error"], status.failure["attempts"]) == ("crash_loop", 2)
    assert run.host.calls[-1] == ("stop_all",)


def test_the_store_lost_costs_no_process(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(steps(1, 0, 1), loses_store, parks(0, 1), steps(2, 0, 1), returns(0, 1))
    assert (status.state, run.kept()) == ("SUCCEEDED", [[0, 1]])


def test_the_zygote_lost_costs_all_of_its_node(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(steps(1, 0, 1), loses_zygote, steps(2, 0, 1), returns(0, 1))
    assert (status.state, run.kept()) == ("SUCCEEDED", [[]])
    assert run.started(1) == [("start", "rank0.g1"), ("start", "rank1.g1")]


class _Nodes:
    """Three nodes of two ranks each, of which the second is lost."""

    def __init__(self, bench: Callable[..., Bench], **policy: Any) -> None:
        self.run = bench(world_size=6, gpus_per_node=2, restarts=RestartPolicy(**policy))
        self.run.host.node_count = 3

    def loses(self, host: ScriptedHost) -> list[Any]:
        host.missing.add(1)
        raise NodeLostError("node 1 was lost: its connection was closed", node=1)


def test_a_lost_node_is_shrunk_around_and_the_others_go_on_under_other_ranks(bench: Callable[..., Bench]) -> None:
    nodes = _Nodes(bench, min_gpus=2)
    run = nodes.run
    status = run.supervise(
        steps(5, *range(6)), nodes.loses, parks(0, 1, 4, 5), steps(6, 0, 1, 2, 3), returns(0, 1, 2, 3)
    )
    assert (status.state, status.world_size, run.kept()) == ("SUCCEEDED", 4, [[0, 1, 4, 5]])
    assert run.started(1) == [
        ("begin anew", "rank0.g0", "rank0.g1"), ("begin anew", "rank1.g0", "rank1.g1"),
        ("begin anew", "rank4.g0", "rank2.g1"), ("begin anew", "rank5.g0", "rank3.g1"),
    ]  # fmt: skip
    assert run.host.environments["rank2.g1"]["WORLD_SIZE"] == "4"


def test_cancelled_while_a_lost_node_is_waited_for(bench: Callable[..., Bench]) -> None:
    nodes = _Nodes(bench)
    run = nodes.run
    status = run.supervise(steps(5, *range(6)), nodes.loses, parks(0, 1, 4, 5), passes(9), run.asks("cancel"))
    assert status.state == "CANCELLED"
    assert run.host.calls[-1] == ("stop_all",)


def test_a_parked_slot_is_written_by_nobody_else(tmp_path: pathlib.Path) -> None:
    """What a given-up call still closes must not show its rank as training."""
    page = Page.create(tmp_path / "page", 1)
    page.slot(0).start(0)
    of_the_loop = page.slot(0)
    of_the_loop.beat(3)
    page.slot(0).fail(parked=True)
    of_the_loop.beat(4)
    assert (page.slot(0).read().state, page.slot(0).read().step) == (WorkerState.PARKED, 3)
    page.slot(0).start(1)
    assert page.slot(0).read().state is WorkerState.STARTING
