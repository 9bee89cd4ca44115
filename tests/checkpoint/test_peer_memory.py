"""Simulated nodes, each with a helper process and its ranks: a node that is lost is restored from its neighbour."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, SaveReport
from sgpu.contract import process as process_contract
from sgpu.contract import records

REPOSITORY = pathlib.Path(__file__).parents[2]
SCRIPT = pathlib.Path(__file__).with_name("rank_on_command.py")
DEADLINE_SECONDS = 30
WORLD = 4


class Nodes:
    """Starts and kills helpers as agents would; reads what they tell the run."""

    def __init__(self, folder: pathlib.Path, count: int, *, start: bool = False) -> None:
        self._ranks_each = WORLD // count
        self.run = folder / "run"
        self.run.mkdir()
        self.fired = folder / "fired.log"
        self._count = count
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self.names: dict[int, str] = {}
        for node in range(count) if start else ():
            self.start(node)

    def start(self, node: int, **environment: str) -> None:
        name = f"sgpu-{os.getpid()}-{time.monotonic_ns()}"
        process = subprocess.Popen(
            [sys.executable, "-m", "sgpu.checkpoint.helper", *map(str, (
                "--name", name, "--first-rank", node * self._ranks_each, "--ranks", self._ranks_each, "--node", node,
                "--nodes", self._count, "--address", f"127.0.0.{node + 2}", "--peers", self.run / "peers",
            ))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "SGPU_RUN_DIR": str(self.run),
                 "SGPU_FAILPOINT_LOG": str(self.fired), **environment},
            preexec_fn=functools.partial(process_contract.die_with_parent, os.getpid()),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        self._processes[node], self.names[node] = process, name

    def kill(self, node: int) -> None:
        self._processes[node].kill()
        self.gone(node)

    def gone(self, node: int) -> int:
        """Waits until it has ended."""
        process = self._processes.pop(node)
        code = process.wait(60)  # by itself: it would end, too, when its input is closed, and with 0
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        return code

    def helpers(self) -> list[str]:
        """Names, for the trainers of each rank."""
        return [self.names[rank // self._ranks_each] for rank in range(WORLD)]

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run / "events.jsonl"
        found = records.read_all(path) if path.exists() else []
        return [record for record in found if record["kind"] == kind]

    def wait_for(self, kind: str, count: int, **facts: Any) -> list[dict[str, Any]]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            found = [event for event in self.events(kind) if facts.items() <= event.items()]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, (kind, facts, self.events(kind), self.events("checkpoint_not_copied"))
            time.sleep(0.02)  # a file tells nobody that it grew

    def close(self) -> None:
        for node, process in list(self._processes.items()):
            assert process.stdin is not None
            process.stdin.close()
            assert self.gone(node) == 0


@pytest.fixture
def nodes(tmp_path: pathlib.Path) -> Iterator[Nodes]:
    found = Nodes(tmp_path, 2, start=True)
    yield found
    found.close()


class Trainers:
    """The ranks; torch is loaded once for all tests here."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), str(WORLD), str(folder / "meet")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
                preexec_fn=functools.partial(process_contract.die_with_parent, os.getpid()),
            ) for rank in range(WORLD)
        ]  # fmt: skip

    def live(self, root: pathlib.Path, helpers: list[str], generation: int, *steps: tuple[int, str]) -> list[list[Any]]:
        """A life of each: with steps (and what fails in each), saves; without, restores. What each says."""
        for process, helper in zip(self.processes, helpers, strict=True):
            assert process.stdin is not None
            process.stdin.write(json.dumps([str(root), helper, generation, steps]) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self.processes if process.stdout is not None]
        return [json.loads(answer) for answer in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    found = Trainers(tmp_path_factory.mktemp("trainers"))
    yield found
    found.close()


@pytest.fixture
def live(trainers: Trainers, nodes: Nodes, tmp_path: pathlib.Path) -> Callable[..., list[list[Any]]]:
    def do(generation: int, *steps: tuple[int, str], helpers: list[str] | None = None) -> list[list[Any]]:
        return trainers.live(tmp_path / "root", helpers or nodes.helpers(), generation, *steps)

    return do


def test_a_lost_node_is_restored_from_its_neighbours_memory(nodes: Nodes, live: Any, tmp_path: pathlib.Path) -> None:
    assert live(0, (10, ""), (20, "")) == [[None, None]] * WORLD
    copied = nodes.wait_for("checkpoint_copied", WORLD, step=20)
    assert sorted((event["rank"], event["node"]) for event in copied) == [(0, 1), (1, 1), (2, 0), (3, 0)]
    assert all(event["size_bytes"] > 500_000 for event in copied)
    nodes.kill(0)
    nodes.start(0)
    assert live(1) == [[20, "peer memory", False, 0]] * WORLD
    assert live(1, (30, "")) == [[None]] * WORLD
    nodes.wait_for("checkpoint_copied", WORLD, step=30)
    assert Catalog(tmp_path / "root").steps() == [10, 20, 30]


def test_a_node_of_many_fetches_what_it_lacks(trainers: Trainers, tmp_path: pathlib.Path) -> None:
    """Each node lacks what is neither its own nor its neighbour's; the lost one lacks everything."""
    ring, root = Nodes(tmp_path, 4, start=True), tmp_path / "root"
    try:
        trainers.live(root, ring.helpers(), 0, (10, ""))
        copied = ring.wait_for("checkpoint_copied", WORLD, step=10)
        assert sorted((event["rank"], event["node"]) for event in copied) == [(0, 1), (1, 2), (2, 3), (3, 0)]
        ring.kill(2)
        ring.start(2)
        assert trainers.live(root, ring.helpers(), 1) == [[10, "peer memory", False, 0]] * WORLD
        for node in (2, 3):  # the copies of 2 are lost with 3
            ring.kill(node)
            ring.start(node)
        assert trainers.live(root, ring.helpers(), 2) == [[10, "volume", True, 0]] * WORLD
    finally:
        ring.close()


def test_what_the_volume_refused_is_restored_all_the_same(nodes: Nodes, live: Any, tmp_path: pathlib.Path) -> None:
    first, *_ = live(0, (10, ""), (20, "checkpoint.shard_half=errno:ENOSPC"))
    assert "No space left" in first[1]
    assert "checkpoint.shard_half" in nodes.fired.read_text()
    nodes.wait_for("checkpoint_copied", WORLD, step=20)
    assert Catalog(tmp_path / "root").steps() == [10]
    nodes.kill(1)
    nodes.start(1)
    assert live(1) == [[20, "peer memory", False, 0]] * WORLD


@pytest.mark.parametrize(
    ("place", "lost"),
    [("shard_half@0", 0), ("shard_written@0", 0), ("done@0", 0), ("manifest", 0), ("copy_half@0", 0),
     ("copy_arrived@0", 1)],
)  # fmt: skip
def test_a_node_is_lost_in_the_middle(place: str, lost: int, nodes: Nodes, live: Any, tmp_path: pathlib.Path) -> None:
    """While rank 0's share is written, committed, sent or received: what is restored is whole, and the newest."""
    live(0, (10, ""))
    nodes.wait_for("checkpoint_copied", WORLD, step=10)
    live(0, (20, f"checkpoint.{place}=kill"))
    assert nodes.gone(lost) == -9
    assert f"checkpoint.{place.partition('@')[0]} rank=" in nodes.fired.read_text()
    newest = Catalog(tmp_path / "root").steps()[-1]
    nodes.start(lost)
    first, *others = live(1)
    assert others == [first] * (WORLD - 1)
    step, source, read, skipped = first
    assert newest <= step <= 20
    assert (source, read, skipped) in (("volume", True, 0), ("peer memory", False, 0))
    if "copy" in place:  # node 1 has half of rank 0's share, or node 0 lost node 1's answer
        assert not [event for event in nodes.events("checkpoint_copied") if (event["step"], event["rank"]) == (20, 0)]
        assert source == "volume" or lost == 1


def test_a_newer_one_on_the_volume_beats_the_neighbour(nodes: Nodes, live: Any, tmp_path: pathlib.Path) -> None:
    live(0, (10, ""))
    nodes.wait_for("checkpoint_copied", WORLD, step=10)
    live(0, (20, ""), helpers=["nobody"] * WORLD)
    assert Catalog(tmp_path / "root").steps() == [10, 20]
    nodes.kill(0)
    nodes.start(0)
    assert live(1) == [[20, "volume", True, 0]] * WORLD


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Callable[..., list[SaveReport]]:
    """One trainer in this process, of rank 0; the reports of its saves."""

    def do(name: str | None, *steps: int, peer_memory: bool = True, each: Any = lambda: None) -> list[SaveReport]:
        if name is not None:
            monkeypatch.setenv("SGPU_CHECKPOINT_HELPER", name)
        box, reports = {"w": torch.zeros(500_000)}, list[SaveReport]()
        policy = CheckpointPolicy(str(tmp_path / "root"), peer_memory=peer_memory)
        with Checkpointer(policy, {"box": box}, rank=0, world_size=1) as checkpointer:
            for step in steps:
                box["w"].fill_(step)
                checkpointer.save(step)
                checkpointer.wait()
                reports += checkpointer.poll()
                each()
        assert Catalog(tmp_path / "root").verify(steps[-1], deep=True).ok
        return reports

    return do


def test_a_dead_neighbour_is_told_and_saves_go_on(nodes: Nodes, save: Any) -> None:
    save(nodes.names[1], 1)  # so that it listens
    nodes.kill(1)
    failures = iter(range(1, 9))
    reports = save(nodes.names[0], 2, 3, each=lambda: nodes.wait_for("checkpoint_not_copied", next(failures)))
    assert [report.error for report in reports] == [None, None]
    assert reports[0].not_copied == 0  # not known yet
    assert reports[1].not_copied == 1
    assert "the checkpoint helper of node 1 does not answer at 127.0.0.3" in str(reports[1].copy_error)
    told = nodes.events("checkpoint_not_copied")
    assert [(event["step"], event["node"], event["count"]) for event in told] == [(2, 1, 1), (3, 1, 2)]


def test_a_slow_neighbour_holds_up_nothing(nodes: Nodes, save: Any) -> None:
    save(nodes.names[1], 1)
    nodes.kill(0)
    nodes.start(0, SGPU_PEER_BYTES_PER_SECOND="100000")
    reports = save(nodes.names[0], 2, 3)
    assert [report.error for report in reports] == [None, None]
    assert not [event for event in nodes.events("checkpoint_copied") if event["step"] > 1]  # the saves are done
    nodes.wait_for("checkpoint_not_copied", 1, step=2)
    reports += save(nodes.names[0], 4)
    assert sum(report.not_copied for report in reports) >= 1
    assert {report.copy_error for report in reports if report.not_copied} == {
        "the next save was staged before the copy was complete: save less often"
    }


def test_one_node_has_no_neighbour(tmp_path: pathlib.Path, save: Any, caplog: pytest.LogCaptureFixture) -> None:
    alone = Nodes(tmp_path, 1, start=True)
    try:
        (report,) = save(alone.names[0], 1)
        reason = "this run has one node, so there is no neighbour whose memory could keep a copy"
        assert (report.error, report.not_copied, report.copy_error) == (None, 0, reason)
        assert f"peer_memory: nothing is copied to another node: {reason}" in caplog.text
        assert [event["message"] for event in alone.events("warning")] == [f"peer_memory: {reason}"]
    finally:
        alone.close()


def test_a_setting_that_makes_no_sense_is_told(nodes: Nodes, save: Any) -> None:
    nodes.kill(0)
    nodes.start(0, SGPU_PEER_BYTES_PER_SECOND="fast")
    (report,) = save(nodes.names[0], 1)
    assert "SGPU_PEER_BYTES_PER_SECOND must be bytes, 1 or more; found 'fast'" in str(report.copy_error)


def test_without_an_agent_there_is_no_neighbour(save: Any) -> None:
    (report,) = save(None, 1)
    assert (report.error, report.copy_error) == (None, "no agent keeps a helper process on each node")


def test_off_it_does_nothing(nodes: Nodes, save: Any) -> None:
    (report,) = save(nodes.names[0], 1, peer_memory=False)
    assert (report.not_copied, report.copy_error) == (0, None)
    assert not (nodes.run / "peers").exists()
    save(nodes.names[0], 2)
    where = json.loads((nodes.run / "peers" / "0.json").read_text())
    assert where["address"] == "127.0.0.2"
