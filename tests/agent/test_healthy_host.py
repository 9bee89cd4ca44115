"""What follows from a look at a node; and a host that starts nothing on a node that is not fit."""

from __future__ import annotations

import pathlib
from collections import deque
from typing import Any, cast

import pytest

from sgpu.agent.hosting.fitness import Fitness, decide
from sgpu.agent.hosting.healthy_host import Examiner, HealthyHost
from sgpu.agent.supervising.supervisor import Supervisor
from sgpu.agent.workers import LocalHost, NodeUnfitError
from sgpu.contract.heartbeat import Page, Request
from sgpu.contract.policies import RestartPolicy
from sgpu.contract.records import read_all
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.health.probe import Finding, Verdict
from sgpu.testing.clock import FakeClock
from sgpu.testing.host import ScriptedHost, dies, parks, passes, returns, steps

_SIGKILL = 9


def seen(name: str, verdict: Verdict = Verdict.OK, *, kind: Any = "gpu") -> Finding:
    return Finding(probe="ECC", kind=kind, name=name, verdict=verdict, evidence="2 errors", at_once=True)


def bad(name: str, *, kind: Any = "gpu") -> Finding:
    return seen(name, Verdict.FAILED, kind=kind)


@pytest.mark.parametrize(
    ("findings", "visible", "needed", "expected"),
    [
        ([seen("0"), seen("1")], None, 2, Fitness()),
        ([seen("0"), seen("1", Verdict.DEGRADED)], None, 2, Fitness()),
        ([seen("", Verdict.UNKNOWN)], None, 2, Fitness()),
        ([seen("0"), bad("1"), seen("2")], None, 2, Fitness(gpus=("0", "2"), left_out=("gpu 1: ECC: 2 errors",))),
        ([bad("GPU-a"), seen("GPU-b")], ("GPU-a", "GPU-b"), 1,
         Fitness(gpus=("GPU-b",), left_out=("gpu GPU-a: ECC: 2 errors",))),
        ([seen("0"), bad("1")], ("0", "1"), 2,
         Fitness(unfit="gpu 1: ECC: 2 errors; 1 of the 2 GPUs that it needs are fit")),
        ([bad("", kind="node")], None, 1, Fitness(unfit="node: ECC: 2 errors")),
        ([bad("/data", kind="disk"), bad("mlx5_0", kind="nic")], None, 1, Fitness()),
    ],
)  # fmt: skip
def test_what_follows(findings: list[Finding], visible: Any, needed: int, expected: Fitness) -> None:
    assert decide(findings, findings, visible=visible, needed=needed) == expected


def test_what_may_pass_is_not_acted_on() -> None:
    assert decide([bad("0")], [], visible=("0",), needed=1) == Fitness()


class Look:
    """One look: answers once it is `answered`."""

    def __init__(self, *findings: Finding, answered: bool = True) -> None:
        self.answered, self._findings = answered, list(findings)
        self.closed = False

    def poll(self, seconds: float = 0.0) -> bool:
        return self.answered

    def findings(self) -> list[Finding]:
        return self._findings

    def pids(self) -> list[int]:
        return [7]

    def close(self) -> None:
        self.closed = True


class Node:
    """A run of two workers on one node under checks whose looks are scripted."""

    def __init__(
        self, folder: pathlib.Path, *looks: Look, acts: bool = True, visible: Any = ("0", "1"),
        fewest: int | None = None,
    ) -> None:  # fmt: skip
        self.run = RunDir(folder / "run")
        self.run.create()
        self.page = Page.create(self.run.heartbeat, 2)
        self.clock = FakeClock()
        self.local = ScriptedHost(self.run, self.page, self.clock)
        self.looks = deque(looks)
        self.told: list[str] = []
        self.in_process = False
        self.begun = 0
        self.fewest = fewest
        self.examiner = Examiner(self._look, tell=self.told.append, visible=visible, needed=2, fewest=fewest)
        self.host = HealthyHost(cast(LocalHost, self.local), self.examiner, acts=acts, needed=2)

    def _look(self, _seconds: float) -> Look:
        self.begun += 1
        return self.looks.popleft() if len(self.looks) > 1 else self.looks[0]

    def supervise(self, *turns: Any) -> Any:
        self.local._turns.extend(turns)
        spec = RunSpec(
            id="run", name="train", created=0.0, backend="local", world_size=2, gpus_per_node=2, accelerator="cuda",
            seed=1, tracking=Tracking(uri="", experiment=""), python="", working_dir="/",
            restarts=RestartPolicy(in_process=self.in_process, min_gpus=self.fewest),
        )  # fmt: skip
        self.host.open()
        return Supervisor(
            self.run, spec, host=self.host, page=self.page, clock=self.clock, stop_reason=lambda: None
        ).supervise()

    def starts(self) -> list[str]:
        return [call[1] for call in self.local.calls if call[0] == "start"]


def test_workers_that_go_on_wait_for_no_look(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, Look(seen("0"), seen("1")), Look(answered=False))
    node.in_process = True
    status = node.supervise(steps(3, 0, 1), dies(1, _SIGKILL), parks(0), steps(4, 0, 1), returns(0, 1))
    assert (status.state, node.begun) == ("SUCCEEDED", 2)
    assert ("begin anew", "rank0.g0", "rank0.g1") in node.local.calls


def test_a_gpu_found_bad_is_not_gone_on_with(tmp_path: pathlib.Path) -> None:
    """A process cannot change the GPUs that it sees."""
    node = Node(tmp_path, Look(seen("0"), seen("1"), seen("2")), Look(bad("0"), seen("1"), seen("2")), visible=None)
    node.in_process = True
    status = node.supervise(steps(3, 0, 1), dies(1, _SIGKILL), parks(0), steps(4, 0, 1), returns(0, 1))
    assert status.state == "SUCCEEDED"
    assert node.starts() == ["rank0.g0", "rank1.g0", "rank0.g1", "rank1.g1"]
    assert ("end", "rank0.g0") in node.local.calls
    assert node.local.environments["rank0.g1"]["CUDA_VISIBLE_DEVICES"] == "1,2"


def test_a_node_found_unfit_is_not_gone_on_with(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, Look(seen("0"), seen("1")), Look(bad("0"), seen("1")))
    node.in_process = True
    status = node.supervise(steps(3, 0, 1), dies(1, _SIGKILL), parks(0), passes(1))
    assert status.state == "FAILED"
    assert "this node is not fit" in status.failure["message"]
    assert node.local.calls[-1] == ("stop_all",)


def test_a_fit_node_works_and_is_looked_at_again_between_generations(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, Look(seen("0"), seen("1")))
    status = node.supervise(dies(1, _SIGKILL), returns(0, 1))
    assert (status.state, status.restarts, node.told) == ("SUCCEEDED", 1, [])
    assert node.begun == 3  # before the start, after each generation


def test_a_run_on_an_unfit_node_is_refused_with_the_gpu_named(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, Look(seen("0"), bad("1")))
    status = node.supervise()
    assert (status.state, status.restarts, node.starts()) == ("FAILED", 0, [])
    assert status.failure is not None
    assert "gpu 1: ECC: 2 errors; 1 of the 2 GPUs" in status.failure["message"]
    assert node.told == ["FAILED: gpu 1: ECC: 2 errors"]


def test_a_gpu_that_fails_later_ends_the_run_at_the_next_generation_only(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, Look(seen("0"), seen("1")), Look(seen("0"), bad("1")))
    status = node.supervise(dies(1, _SIGKILL))
    assert status.state == "FAILED"
    assert node.starts() == ["rank0.g0", "rank1.g0"]
    assert [event["kind"] for event in read_all(node.run.events)].count("failure") == 2


def test_a_bad_gpu_is_left_out_where_there_are_others(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, Look(seen("0"), bad("1"), seen("2")), visible=None)
    assert node.supervise(returns(0, 1)).state == "SUCCEEDED"
    assert node.local.environments["rank1.g0"]["CUDA_VISIBLE_DEVICES"] == "0,2"
    assert node.told[-1] == "left out: gpu 1: ECC: 2 errors; workers use 0, 2"


def test_it_can_be_told_only(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, Look(seen("0"), bad("1")), acts=False)
    assert node.supervise(returns(0, 1)).state == "SUCCEEDED"
    assert "CUDA_VISIBLE_DEVICES" not in node.local.environments["rank0.g0"]
    assert node.told[0] == "FAILED: gpu 1: ECC: 2 errors"


def test_what_cannot_be_looked_at_is_told_once_and_stops_nothing(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, Look(seen("", Verdict.UNKNOWN), seen("0", Verdict.DEGRADED)))
    assert node.supervise(dies(1, _SIGKILL), returns(0, 1)).state == "SUCCEEDED"
    assert node.told == ["UNKNOWN: gpu: ECC: 2 errors", "DEGRADED: gpu 0: ECC: 2 errors"]


def test_the_first_start_waits_for_the_first_look(tmp_path: pathlib.Path) -> None:
    look = Look(seen("0"), answered=False)
    node = Node(tmp_path, look)
    node.host.open()
    assert (node.host.ready(), node.host.members()) == (False, ())
    look.answered = True
    assert (node.host.ready(), node.host.members()) == (True, (0,))


def test_a_restart_does_not_wait_for_a_wedged_driver(tmp_path: pathlib.Path) -> None:
    """The answer that comes too late counts for the generation after."""
    late = Look(bad("1"), answered=False)
    node = Node(tmp_path, Look(seen("0"), seen("1")), late)

    def answers(_host: ScriptedHost) -> list[Any]:
        late.answered = True
        return []

    status = node.supervise(dies(1, _SIGKILL), answers, dies(0, _SIGKILL))
    assert node.starts() == ["rank0.g0", "rank1.g0", "rank0.g1", "rank1.g1"]
    assert status.state == "FAILED"


def test_an_unfit_node_is_not_opened_again_and_a_look_does_not_outlive_it(tmp_path: pathlib.Path) -> None:
    look = Look(bad("1"))
    node = Node(tmp_path, look, Look(answered=False))
    node.host.open()
    with pytest.raises(NodeUnfitError, match="gpu 1") as caught:
        node.host.wait(0.0)
    assert caught.value.unrecoverable
    node.host.reopen()
    assert ("reopen",) not in node.local.calls
    node.examiner.begin(1.0)
    assert node.examiner.pids() == [7]
    node.host.close()
    assert node.looks[0].closed


@pytest.mark.parametrize("in_process", [False, True])
def test_a_run_that_may_goes_on_without_a_bad_gpu_and_takes_it_back(
    in_process: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine, half = Look(seen("0"), seen("1")), Look(bad("0"), seen("1"))
    node = Node(tmp_path, fine, half, fine, fewest=1)
    node.in_process = in_process

    def both_are_fit(_host: ScriptedHost) -> list[Any]:
        monkeypatch.setattr("sgpu.agent.hosting.healthy_host._EVERY_SECONDS", 0.0)
        return []

    def stops(host: ScriptedHost) -> list[Any]:
        assert host.page.slot(0).requested().what is Request.SAVE_AND_STOP
        host.outcome(0, "preempted", step=5)
        return [host.exited(0)]

    parked = [parks(0)] if in_process else []
    status = node.supervise(
        steps(3, 0, 1), dies(1, _SIGKILL), *parked, steps(4, 0), both_are_fit, passes(1), stops, steps(6, 0, 1),
        returns(0, 1),
    )  # fmt: skip
    assert status.state == "SUCCEEDED"
    assert node.starts() == ["rank0.g0", "rank1.g0", "rank0.g1", "rank0.g2", "rank1.g2"]
    alone = node.local.environments["rank0.g1"]
    assert (alone["CUDA_VISIBLE_DEVICES"], alone["WORLD_SIZE"], alone["LOCAL_WORLD_SIZE"]) == ("1", "1", "1")
    assert node.local.environments["rank0.g2"]["WORLD_SIZE"] == "2"
    sizes = [(each["from_world_size"], each["to_world_size"]) for each in read_all(node.run.events)
             if each["kind"] == "resized"]  # fmt: skip
    assert sizes == [(2, 1), (1, 2)]


def test_a_run_shrinks_no_further_than_it_may(tmp_path: pathlib.Path) -> None:
    node = Node(tmp_path, Look(seen("0"), seen("1")), Look(bad("0"), bad("1")), fewest=1)
    status = node.supervise(dies(1, _SIGKILL))
    assert status.state == "FAILED"
    assert "0 of the 1 GPUs that it needs are fit" in status.failure["message"]
