"""The supervisor, turn by turn: a fake clock, scripted workers, a real run folder."""

from __future__ import annotations

import dataclasses
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from sgpu.agent.supervising.supervisor import Supervisor
from sgpu.agent.workers import NodeLostError
from sgpu.contract.events import emit
from sgpu.contract.heartbeat import Category, Page, Request, Section
from sgpu.contract.policies import RestartPolicy
from sgpu.contract.records import read_all
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.contract.status import Status, read_status
from sgpu.testing.clock import FakeClock
from sgpu.testing.host import ScriptedHost, Turn, dies, loses_store, loses_zygote, passes, raises, returns, steps


class Bench:
    """One run under a supervisor whose workers are scripted. Each failure ends all of them, if not `in_process`."""

    def __init__(self, folder: pathlib.Path, *, world_size: int = 2, in_process: bool = False, **spec: Any) -> None:
        self.run = RunDir(folder / "run")
        self.run.create()
        self.spec = RunSpec(
            id="run", name="train", created=0.0, backend="local", world_size=world_size, gpus_per_node=world_size,
            accelerator="cpu", seed=1, tracking=Tracking(uri="", experiment=""), python="", working_dir="/",
        )  # fmt: skip
        self.spec = dataclasses.replace(self.spec, **spec)
        restarts = dataclasses.replace(self.spec.restarts, in_process=in_process)
        self.spec = dataclasses.replace(self.spec, restarts=restarts)
        self.page = Page.create(self.run.heartbeat, world_size)
        self.clock = FakeClock()
        self.host = ScriptedHost(self.run, self.page, self.clock)
        self.asked: str | None = None

    def supervise(self, *turns: Turn, **options: Any) -> Status:
        self.host._turns.extend(turns)
        status = Supervisor(
            self.run, self.spec, host=self.host, page=self.page, clock=self.clock, stop_reason=lambda: self.asked,
            **options,
        ).supervise()  # fmt: skip
        assert read_status(self.run) == status, "the final status is on disk"
        assert self.host.calls[-1] == ("stop_all",), "nothing is left running"
        assert self.kinds()[-1] == "run_ended"
        return status

    def asks(self, reason: str) -> Turn:
        def turn(_host: ScriptedHost) -> list[Any]:
            self.asked = reason
            return []

        return turn

    def commits(self, step: int) -> Turn:
        def turn(host: ScriptedHost) -> list[Any]:
            emit(self.run, "checkpoint_committed", generation=host.generation, rank=0, step=step)
            return []

        return turn

    def kinds(self) -> list[str]:
        return [event["kind"] for event in read_all(self.run.events)]

    def starts(self) -> list[str]:
        return [call[1] for call in self.host.calls if call[0] == "start"]


@pytest.fixture
def bench(tmp_path: pathlib.Path) -> Callable[..., Bench]:
    return lambda **spec: Bench(tmp_path, **spec)


_SIGKILL = 9
_STARTED = time.monotonic()


def test_a_run_that_succeeds(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(passes(1), steps(1, 0, 1), steps(2, 0, 1), returns(0), returns(1))
    assert (status.state, status.step, status.restarts, status.failure) == ("SUCCEEDED", 2, 0, None)
    assert run.kinds() == ["run_started", "generation_started", "run_ended"]
    assert run.host.calls[:4] == [
        ("begin", (0,)), ("store", "store0"), ("start", "rank0.g0"), ("start", "rank1.g0"),
    ]  # fmt: skip
    environment = run.host.environments["rank1.g0"]
    assert {name: environment[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SGPU_GENERATION")} == {
        "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "SGPU_GENERATION": "0",
    }  # fmt: skip


def test_a_rank_that_returned_and_does_not_leave_holds_nobody_for_long(bench: Callable[..., Bench]) -> None:
    run = bench()
    before = run.clock.monotonic()

    def done_but_alive(host: ScriptedHost) -> list[Any]:
        host.outcome(0)
        return []

    status = run.supervise(done_but_alive, returns(1))
    assert status.state == "SUCCEEDED"
    assert 4 < run.clock.monotonic() - before < 10


def test_exit_0_without_a_result_is_no_success(bench: Callable[..., Bench]) -> None:
    status = bench().supervise(returns(0), dies(1, 0))
    assert status.state == "FAILED"
    assert status.failure is not None
    assert status.failure["rank"] == 1
    assert status.failure["message"] == "rank 1 ended without a result (exit code 0)"
    assert status.failure["error"] == "failure"


def test_the_cause_wins_over_its_effects(bench: Callable[..., Bench]) -> None:
    """Rank 0 sees a lost connection before the death of rank 1 that caused it is seen."""
    run = bench(world_size=3)
    status = run.supervise(
        steps(3, 0, 1, 2),
        raises(0, "RuntimeError", "Connection closed by peer", collateral=True),
        raises(2, "RuntimeError", "Connection closed by peer", collateral=True),
        dies(1, 11),
        raises(0), raises(0), raises(0),
    )  # fmt: skip
    first = next(event for event in read_all(run.run.events) if event["kind"] == "failure")
    assert (first["rank"], first["cause"], first["step"]) == (1, "SIGSEGV, signal 11", 3)
    assert status.state == "FAILED"


def test_effects_without_a_cause_are_told_after_a_moment(bench: Callable[..., Bench]) -> None:
    run = bench(restarts=RestartPolicy(max_restarts=0))
    before = run.clock.monotonic()
    status = run.supervise(raises(0, "RuntimeError", "Connection closed by peer", collateral=True))
    assert status.failure is not None
    assert status.failure["rank"] == 0
    assert 0.2 < run.clock.monotonic() - before < 1.0


def test_a_killed_rank_is_restarted_with_everybody(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(
        steps(5, 0, 1), run.commits(4), dies(1, _SIGKILL), steps(5, 0, 1), steps(6, 0, 1), returns(0, 1)
    )
    assert (status.state, status.restarts, status.generation) == ("SUCCEEDED", 1, 1)
    assert run.starts() == ["rank0.g0", "rank1.g0", "rank0.g1", "rank1.g1"]
    kinds = run.kinds()
    assert kinds == [
        "run_started", "generation_started", "checkpoint_committed", "failure", "restarting", "generation_started",
        "run_ended",
    ]  # fmt: skip
    events = read_all(run.run.events)
    assert events[4]["from_step"] == 4
    assert events[5]["cause"] == "rank 1 ended without a result (SIGKILL, signal 9)"
    stops = [index for index, call in enumerate(run.host.calls) if call == ("stop_all",)]
    assert stops[0] < run.host.calls.index(("store", "store1")), "the old workers are gone before new ones start"


def test_what_an_old_generation_left_is_not_believed(bench: Callable[..., Bench]) -> None:
    """Rank 0 had returned before rank 1 died: after the restart its old result does not count."""
    run = bench()
    status = run.supervise(
        steps(5, 0, 1), returns(0), dies(1, _SIGKILL), passes(1), steps(6, 0, 1), returns(1), returns(0)
    )
    assert status.state == "SUCCEEDED"
    assert status.generation == 1
    assert run.run.outcome(1, 0).exists()


def test_a_crash_loop_ends_with_its_cause(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(*(turn for _ in range(5) for turn in (steps(7, 0, 1), raises(1, "KeyError", "'x'", step=7))))
    assert status.state == "FAILED"
    assert status.failure is not None
    assert (status.failure["error"], status.failure["attempts"], status.failure["step"]) == ("crash_loop", 2, 7)
    assert run.starts().count("rank0.g1") == 1
    assert "rank0.g2" not in run.starts()


def test_waits_grow_and_progress_refills_the_budget(bench: Callable[..., Bench]) -> None:
    run = bench(restarts=RestartPolicy(max_restarts=2, backoff_seconds=8.0))

    def killed_at(step: int) -> list[Turn]:
        return [steps(step, 0, 1), dies(1, _SIGKILL)]

    waited = [passes(20)]  # a wait before a restart is one turn here
    status = run.supervise(
        *killed_at(5), *killed_at(6), *waited, run.commits(100), *killed_at(101), *killed_at(102), *waited,
        *killed_at(103),
    )  # fmt: skip
    assert status.state == "FAILED"
    restarting = [event for event in read_all(run.run.events) if event["kind"] == "restarting"]
    waits = [event["backoff_seconds"] for event in restarting]
    assert waits[0] == 0
    assert 8 <= waits[1] <= 10
    assert waits[2] == 0, "a checkpoint was committed in between"
    assert status.restarts == 4
    assert status.failure is not None
    assert status.failure["error"] == "crash_loop"


def test_restoring_a_later_step_is_progress_too(bench: Callable[..., Bench]) -> None:
    """The worker died between the commit and telling of it."""
    run = bench(restarts=RestartPolicy(max_restarts=1))

    def restored(host: ScriptedHost) -> list[Any]:
        emit(run.run, "restored", generation=host.generation, rank=0, step=6)
        return []

    status = run.supervise(
        steps(7, 0, 1), dies(1, _SIGKILL), restored, steps(7, 0, 1), dies(1, _SIGKILL), passes(1), returns(0, 1)
    )
    assert (status.state, status.restarts) == ("SUCCEEDED", 2)


def test_the_zygote_lost_is_a_failure_like_others(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(steps(1, 0, 1), loses_zygote, steps(2, 0, 1), returns(0, 1))
    assert (status.state, status.restarts) == ("SUCCEEDED", 1)
    assert ("reopen",) in run.host.calls


def test_the_zygote_lost_while_starting(bench: Callable[..., Bench]) -> None:
    run = bench()
    run.host.failing_starts = 1
    status = run.supervise(passes(1), returns(0, 1))
    assert (status.state, status.restarts) == ("SUCCEEDED", 1)
    assert run.host.calls.count(("reopen",)) == 1


def test_the_zygote_that_never_starts_ends_the_run(bench: Callable[..., Bench]) -> None:
    run = bench()
    run.host.failing_starts = 100
    status = run.supervise()
    assert status.state == "FAILED"
    assert status.failure is not None
    assert "the zygote ended" in status.failure["message"]
    assert run.starts() == []


def test_the_zygote_lost_while_waiting_before_a_restart(bench: Callable[..., Bench]) -> None:
    run = bench(restarts=RestartPolicy(backoff_seconds=5.0))
    status = run.supervise(
        steps(1, 0, 1), dies(0, _SIGKILL), steps(2, 0, 1), dies(0, _SIGKILL), loses_zygote, passes(9), returns(0, 1)
    )
    assert status.state == "SUCCEEDED"
    assert ("reopen",) in run.host.calls


def test_the_store_lost(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(steps(1, 0, 1), loses_store, returns(0, 1))
    assert (status.state, status.restarts) == ("SUCCEEDED", 1)
    failure = next(event for event in read_all(run.run.events) if event["kind"] == "failure")
    assert (failure["rank"], failure["message"]) == (None, "the rendezvous store ended")


def test_cancelled_while_torch_is_imported(bench: Callable[..., Bench]) -> None:
    run = bench()
    run.host.importing = True
    status = run.supervise(passes(1), run.asks("cancel"))
    assert status.state == "CANCELLED"
    assert run.starts() == []


def test_workers_wait_for_a_slow_import(bench: Callable[..., Bench]) -> None:
    run = bench()
    run.host.importing = True

    def imported(host: ScriptedHost) -> list[Any]:
        host.importing = False
        return []

    status = run.supervise(passes(50), imported, returns(0, 1))
    assert status.state == "SUCCEEDED"


def test_cancelled_before_the_loop_ends_at_once(bench: Callable[..., Bench]) -> None:
    run = bench()
    before = run.clock.monotonic()
    status = run.supervise(passes(1), run.asks("cancel"))
    assert status.state == "CANCELLED"
    assert run.clock.monotonic() - before < 2
    assert "failure" not in run.kinds()


def test_cancelled_in_the_loop_may_save(bench: Callable[..., Bench]) -> None:
    """All ranks are told the same step to stop after, one that none has passed."""
    run = bench()
    asked = []

    def looks(host: ScriptedHost) -> list[Any]:
        asked.extend(host.page.slot(rank).requested() for rank in (0, 1))
        for rank in (0, 1):
            host.outcome(rank, "preempted", step=asked[rank].stop_step)
        return [host.exited(0, 3 << 8), host.exited(1, 3 << 8)]

    status = run.supervise(steps(7, 0), steps(6, 1), passes(2), run.asks("cancel"), looks)
    assert status.state == "CANCELLED"
    assert [each.what for each in asked] == [Request.SAVE_AND_STOP] * 2
    assert asked[0].stop_step == asked[1].stop_step > 7


@pytest.mark.parametrize("hang_seconds", [None, 60.0])
@pytest.mark.parametrize(("seconds", "ahead"), [(10.0, 2), (0.1, 6), (0.001, 501)])
def test_the_step_to_stop_after_is_near_however_far_the_run_is(
    bench: Callable[..., Bench], hang_seconds: float | None, seconds: float, ahead: int
) -> None:
    """A run that was resumed at step 100,000 a moment ago has not made all of these steps since."""
    run = bench(restarts=RestartPolicy(hang_seconds=hang_seconds))
    asked = []

    def looks(host: ScriptedHost) -> list[Any]:
        asked.append(host.page.slot(0).requested().stop_step)
        host.outcome(0, "preempted", step=asked[0])
        return [host.exited(0, 3 << 8), host.exited(1, 3 << 8)]

    told = [steps(step, 0, 1, seconds=seconds) for step in range(100_000, 100_005)]
    run.supervise(*told, run.asks("preempt"), looks)
    assert 100_004 + 1 < asked[0] <= 100_004 + ahead


def test_a_cancel_that_is_not_answered_ends_the_workers(bench: Callable[..., Bench]) -> None:
    run = bench()
    before = run.clock.monotonic()
    status = run.supervise(steps(7, 0, 1), run.asks("cancel"))
    assert status.state == "CANCELLED"
    assert 2 < run.clock.monotonic() - before < 6


def test_preempted(bench: Callable[..., Bench]) -> None:
    run = bench()

    def answer(host: ScriptedHost) -> list[Any]:
        for rank in (0, 1):
            host.outcome(rank, "preempted", step=9)
        return [host.exited(0, 3 << 8), host.exited(1, 3 << 8)]

    status = run.supervise(steps(7, 0, 1), run.asks("preempt"), passes(10), answer)
    assert status.state == "PREEMPTED"
    assert "preempted" in run.kinds()


def test_a_preemption_has_a_deadline(bench: Callable[..., Bench]) -> None:
    run = bench()
    before = run.clock.monotonic()
    status = run.supervise(steps(7, 0, 1), run.asks("preempt"), preempt_seconds=12.0)
    assert status.state == "PREEMPTED"
    assert 12 <= run.clock.monotonic() - before < 14


def test_asked_to_stop_too_late_is_a_success(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(steps(7, 0, 1), run.asks("preempt"), returns(0, 1))
    assert status.state == "SUCCEEDED"


def test_cancelled_while_waiting_before_a_restart(bench: Callable[..., Bench]) -> None:
    run = bench(restarts=RestartPolicy(backoff_seconds=50.0))
    before = run.clock.monotonic()
    status = run.supervise(
        steps(1, 0, 1), dies(0, _SIGKILL), steps(2, 0, 1), dies(0, _SIGKILL), passes(1), run.asks("cancel")
    )
    assert status.state == "CANCELLED"
    assert run.clock.monotonic() - before < 10
    assert "rank0.g2" not in run.starts()


@pytest.mark.parametrize("backing_off", [False, True])
def test_a_run_has_its_own_time_limit(bench: Callable[..., Bench], backing_off: bool) -> None:
    run = bench(timeout_seconds=20.0, restarts=RestartPolicy(backoff_seconds=50.0))
    before = run.clock.monotonic()
    turns = [steps(1, 0, 1), dies(0, _SIGKILL), steps(2, 0, 1), dies(0, _SIGKILL)] if backing_off else [steps(1, 0, 1)]
    status = run.supervise(*turns)
    assert status.state == "FAILED"
    assert status.failure is not None
    assert status.failure["message"] == "the run did not end within timeout_seconds=20"
    assert 20 <= run.clock.monotonic() - before < 22


def test_a_hang_is_seen_blamed_and_survived(bench: Callable[..., Bench]) -> None:
    run = bench(restarts=RestartPolicy(hang_seconds=5.0))

    def answers(host: ScriptedHost) -> list[Any]:
        assert [call for call in host.calls if call[0] == "signal"] == [
            ("signal", "rank0.g0", signal.SIGUSR2), ("signal", "rank1.g0", signal.SIGUSR2),
        ]  # fmt: skip
        run.run.stacks(0, 0).write_text(
            'Current thread 0x1 (most recent call first):\n  File "/torch/distributed/x", line 1 in f\n'
        )
        run.run.stacks(0, 1).write_text(
            'Current thread 0x1 (most recent call first):\n  File "/my/train.py", line 7 in f\n'
        )
        host.clock.advance(0.5)
        return []

    def in_a_step(host: ScriptedHost) -> list[Any]:
        for rank in (0, 1):
            host.page.slot(rank).enter(Section.STEP)
        return []

    status = run.supervise(in_a_step, steps(7, 0, 1), *[passes(1.9)] * 3, answers, steps(8, 0, 1), returns(0, 1))
    assert (status.state, status.restarts) == ("SUCCEEDED", 1)
    failure = next(event for event in read_all(run.run.events) if event["kind"] == "failure")
    assert (failure["rank"], failure["cause"], failure["step"]) == (1, "no step for 5 s", 7)
    assert "completed no step for" in failure["message"]
    assert str(run.run.stacks(0, 1)) in failure["message"]


def test_a_slot_of_the_generation_before_is_no_hang(bench: Callable[..., Bench]) -> None:
    """After a long wait, the new workers are slow to come up; what the old ones last said is old, and not theirs."""
    run = bench(restarts=RestartPolicy(hang_seconds=5.0))
    taken = []

    def late(host: ScriptedHost) -> list[Any]:
        assert not [call for call in host.calls if call[0] == "signal"]
        for rank in (0, 1):
            host.page.slot(rank).start(1)
        taken.append(True)
        return []

    def slow_start(self: ScriptedHost, name: str, **facts: Any) -> None:
        self.calls.append(("start", name))
        self.generation = facts["generation"]

    run.host.start = slow_start.__get__(run.host)  # type: ignore[method-assign]
    for rank in (0, 1):
        run.page.slot(rank).start(0)
    status = run.supervise(
        steps(7, 0, 1), dies(1, _SIGKILL), passes(100), passes(1), late, steps(8, 0, 1), returns(0, 1)
    )
    assert taken
    assert (status.state, status.restarts) == ("SUCCEEDED", 1)


def test_a_stopped_rank_hangs_wherever_it_is(bench: Callable[..., Bench]) -> None:
    """It has not reached its loop, where nothing is promised; standing still is no set-up either."""
    run = bench(restarts=RestartPolicy(hang_seconds=5.0))

    def stops(host: ScriptedHost) -> list[Any]:
        host.standing_still.add("rank1.g0")
        return []

    status = run.supervise(stops, *[passes(2)] * 3, passes(1), passes(1), returns(0, 1))
    assert (status.state, status.restarts) == ("SUCCEEDED", 1)
    failure = next(event for event in read_all(run.run.events) if event["kind"] == "failure")
    assert (failure["rank"], failure["cause"]) == (1, "no step for 5 s")
    assert "after step 0; it was stopped by a signal (SIGSTOP); see " in failure["message"]


def test_a_rank_that_does_not_reach_its_loop_is_named(bench: Callable[..., Bench]) -> None:
    """Rank 0 waits in DDP's constructor for rank 1, which is elsewhere; nobody has promised a step yet."""
    run = bench(restarts=RestartPolicy(start_seconds=5.0))

    def answers(host: ScriptedHost) -> list[Any]:
        inside = "Current thread 0x1 (most recent call first):\n  File "
        run.run.stacks(0, 0).write_text(f'{inside}"/x/torch/distributed/utils.py", line 1 in _sync\n')
        run.run.stacks(0, 1).write_text(f'{inside}"/my/train.py", line 7 in download\n')
        host.clock.advance(0.5)
        return []

    status = run.supervise(passes(2), passes(2), passes(1.5), answers, steps(1, 0, 1), returns(0, 1))
    assert (status.state, status.restarts) == ("SUCCEEDED", 1)
    failure = next(event for event in read_all(run.run.events) if event["kind"] == "failure")
    assert (failure["rank"], failure["cause"], failure["step"]) == (1, "no loop for 5 s", 0)
    assert "rank 1 had not begun its loop" in failure["message"]
    assert f"after its start; in download at /my/train.py:7; see {run.run.stacks(0, 1)}" in failure["message"]


def test_a_function_without_a_loop_may_take_its_time(bench: Callable[..., Bench]) -> None:
    status = bench(restarts=RestartPolicy(hang_seconds=5.0)).supervise(passes(5000), passes(5000), returns(0, 1))
    assert (status.state, status.restarts) == ("SUCCEEDED", 0)


def test_a_kill_for_want_of_memory_is_named(bench: Callable[..., Bench]) -> None:
    run = bench(restarts=RestartPolicy(max_restarts=0))

    def runs_out_of_memory(host: ScriptedHost) -> list[Any]:
        return [dataclasses.replace(host.exited(1, _SIGKILL), out_of_memory=True)]

    status = run.supervise(steps(3, 0, 1), runs_out_of_memory)
    assert status.failure is not None
    assert status.failure["cause"] == "out of memory: SIGKILL, signal 9 by the kernel"
    assert status.failure["message"] == (
        "rank 1 ended without a result (out of memory: SIGKILL, signal 9 by the kernel)"
    )


def test_a_lost_node_is_named(bench: Callable[..., Bench]) -> None:
    run = bench(restarts=RestartPolicy(max_restarts=0))

    def loses_node(host: ScriptedHost) -> list[Any]:
        raise NodeLostError("node 1 was lost: its connection was closed", node=1)

    status = run.supervise(steps(3, 0, 1), raises(0, "RuntimeError", "Connection closed", collateral=True), loses_node)
    assert status.failure is not None
    assert (status.failure["rank"], status.failure["node"], status.failure["step"]) == (None, 1, 3)
    assert ("reopen",) in run.host.calls


class _Nodes:
    """Two nodes of one rank each, of which the second comes and goes."""

    def __init__(self, bench: Callable[..., Bench], **policy: Any) -> None:
        self.run = bench(gpus_per_node=1, restarts=RestartPolicy(**policy))
        self.run.host.node_count = 2

    def loses(self, host: ScriptedHost) -> list[Any]:
        host.missing.add(1)
        raise NodeLostError("node 1 was lost: its connection was closed", node=1)

    def has_again(self, host: ScriptedHost) -> list[Any]:
        host.missing.clear()
        return []

    def resized(self) -> list[tuple[int, int, int]]:
        found = [event for event in read_all(self.run.run.events) if event["kind"] == "resized"]
        return [(each["generation"], each["from_world_size"], each["to_world_size"]) for each in found]


def _stop_where_asked(*ranks: int) -> Turn:
    def turn(host: ScriptedHost) -> list[Any]:
        asked = [host.page.slot(rank).requested() for rank in ranks]
        assert {each.what for each in asked} == {Request.SAVE_AND_STOP}
        for rank, each in zip(ranks, asked, strict=True):
            host.page.slot(rank).beat(each.stop_step)
            host.outcome(rank, "preempted", step=each.stop_step)
        return [host.exited(rank, 3 << 8) for rank in ranks]

    return turn


def test_a_run_shrinks_to_what_is_left_and_grows_back(bench: Callable[..., Bench]) -> None:
    nodes = _Nodes(bench, min_gpus=1)
    run = nodes.run
    status = run.supervise(
        steps(5, 0, 1), run.commits(4), nodes.loses, steps(6, 0), passes(1), nodes.has_again, passes(0.1),
        _stop_where_asked(0), steps(9, 0, 1), passes(1), returns(0, 1),
    )  # fmt: skip
    assert (status.state, status.restarts, status.generation, status.world_size) == ("SUCCEEDED", 1, 2, 2)
    assert run.starts() == ["rank0.g0", "rank1.g0", "rank0.g1", "rank0.g2", "rank1.g2"]
    assert nodes.resized() == [(1, 2, 1), (2, 1, 2)]
    assert [call[1] for call in run.host.calls if call[0] == "begin"] == [(0, 1), (0,), (0, 1)]
    worlds = [run.host.environments[name]["WORLD_SIZE"] for name in ("rank1.g0", "rank0.g1", "rank1.g2")]
    assert worlds == ["2", "1", "2"]
    assert run.page.slot(0).requested().what is Request.NONE, "the new workers are not asked to stop"


def test_a_run_that_shrank_may_end_so(bench: Callable[..., Bench]) -> None:
    nodes = _Nodes(bench, min_gpus=1)
    status = nodes.run.supervise(steps(5, 0, 1), nodes.loses, steps(6, 0), returns(0))
    assert (status.state, status.world_size, status.step) == ("SUCCEEDED", 1, 6)


@pytest.mark.parametrize("min_gpus", [None, 2])
def test_a_run_that_may_not_shrink_waits(bench: Callable[..., Bench], min_gpus: int | None) -> None:
    nodes = _Nodes(bench, min_gpus=min_gpus)
    status = nodes.run.supervise(
        steps(5, 0, 1), nodes.loses, passes(50), nodes.has_again, steps(6, 0, 1), returns(0, 1)
    )
    assert (status.state, status.world_size, status.restarts) == ("SUCCEEDED", 2, 1)
    assert nodes.resized() == []


def test_cancelled_while_it_grows(bench: Callable[..., Bench]) -> None:
    nodes = _Nodes(bench, min_gpus=1)
    run = nodes.run
    status = run.supervise(
        steps(5, 0, 1), nodes.loses, steps(6, 0), nodes.has_again, run.asks("cancel"), _stop_where_asked(0)
    )
    assert (status.state, status.world_size) == ("CANCELLED", 1)
    assert run.starts()[-1] == "rank0.g1"


def test_a_failure_while_it_grows_is_one_like_others(bench: Callable[..., Bench]) -> None:
    nodes = _Nodes(bench, min_gpus=1)
    status = nodes.run.supervise(
        steps(5, 0, 1), nodes.loses, steps(6, 0), nodes.has_again, passes(0.1), raises(0, "OSError", "disk", step=6),
        passes(0.1), passes(2), steps(7, 0, 1), passes(1), returns(0, 1),
    )  # fmt: skip
    assert (status.state, status.restarts, status.world_size) == ("SUCCEEDED", 2, 2)
    assert nodes.resized() == [(1, 2, 1), (2, 1, 2)]


def test_a_step_at_the_last_moment_clears_the_suspicion(bench: Callable[..., Bench]) -> None:
    run = bench(restarts=RestartPolicy(hang_seconds=5.0))

    def wakes(host: ScriptedHost) -> list[Any]:
        for rank in (0, 1):
            slot = host.page.slot(rank)
            slot.beat(8)
            slot._since = int(host.clock.monotonic() * 1e9)
            slot.enter(Section.USER, limit_seconds=10_000)
        host.clock.advance(1.0)
        return []

    status = run.supervise(steps(7, 0, 1), *[passes(2)] * 8, wakes, returns(0, 1))
    assert (status.state, status.restarts) == ("SUCCEEDED", 0)
    assert any(call[0] == "signal" for call in run.host.calls)


def test_a_resumed_run_goes_on_counting_generations(bench: Callable[..., Bench]) -> None:
    run = bench()
    status = run.supervise(returns(0, 1), first_generation=3)
    assert run.starts() == ["rank0.g3", "rank1.g3"]
    assert (status.state, status.generation, status.restarts) == ("SUCCEEDED", 3, 0)


def test_a_rank_that_waits_for_data_window_after_window_is_named(bench: Callable[..., Bench]) -> None:
    one = bench()

    def window(number: int) -> Turn:
        """Both ranks are 20 steps and 4 s further; rank 1 has waited for data for half of it, rank 0 for a tenth."""

        def turn(host: ScriptedHost) -> list[Any]:
            for rank, waited in ((0, 0.4), (1, 2.0)):
                slot = host.page.slot(rank)
                slot.beat(20 * number)
                before = slot.read()
                seconds = list(before.seconds)
                seconds[Category.DATA] = waited * number
                beat_ns = int((_STARTED + 4.0 * number) * 1e9)
                slot.mirror(dataclasses.replace(before, beat_ns=beat_ns, seconds=tuple(seconds)))
            return []

        return turn

    status = one.supervise(*(window(number) for number in range(1, 6)), returns(0, 1))
    assert status.state == "SUCCEEDED"
    (told,) = [event for event in read_all(one.run.events) if event["kind"] == "straggler"]
    assert (told["rank"], told["generation"], round(told["ratio"], 3)) == (1, 0, 5.0)
    assert told["section"] == "data"
    assert told["seconds"] == pytest.approx(0.1)
