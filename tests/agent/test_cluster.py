"""The controller's hands and those of the other nodes, over real sockets: scripted workers, clocks that are told."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from sgpu.agent.control import open_page
from sgpu.agent.nodes.cluster import ClusterHost
from sgpu.agent.nodes.connections import Nodes, read_controller
from sgpu.agent.nodes.follower import Follower, Place, find_controller
from sgpu.agent.nodes.link import LinkLostError
from sgpu.agent.notices import Notice
from sgpu.agent.workers import Exit, NodeLostError, NodeUnfitError, ZygoteLostError
from sgpu.contract.heartbeat import Category, Page, Request, WorkerState
from sgpu.contract.policies import RestartPolicy
from sgpu.contract.records import read_all
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec, Tracking
from sgpu.contract.status import NodeStatus, Status
from sgpu.testing.clock import FakeClock
from sgpu.testing.proxy import FaultyProxy

_TIMEOUT_SECONDS = 5.0


class Hands:
    """A node's own workers, as a script: what `exits` and `lost` hold comes with the next `wait`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.exits: list[Exit] = []
        self.lost: str | None = None
        self.unfit: str | None = None
        self.is_ready = False
        self.still: set[str] = set()
        self.ignores_stop = False
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        return self._read

    def open(self) -> None:
        self.calls.append(("open",))

    def reopen(self) -> None:
        self.calls.append(("reopen",))
        self.lost = None

    def ready(self) -> bool:
        return self.is_ready

    def open_store(self, name: str) -> int:
        self.calls.append(("store", name))
        return 29500

    def start(
        self, name: str, *, rank: int, generation: int, environment: Mapping[str, str], log: pathlib.Path,
        parked: str | None = None,
    ) -> None:  # fmt: skip
        out_of = () if parked is None else (parked,)
        self.calls.append(("start", name, rank, generation, environment["RANK"], str(log), *out_of))

    def wait(self, seconds: float) -> list[Exit]:
        if self.unfit is not None:
            raise NodeUnfitError(self.unfit)
        if self.lost is not None:
            raise ZygoteLostError(self.lost)
        exits, self.exits = self.exits, []
        return exits

    def signal(self, name: str, number: int) -> None:
        self.calls.append(("signal", name, number))

    def examine(self, name: str, into: pathlib.Path) -> None:
        self.calls.append(("examine", name, into))

    def stopped(self, name: str) -> bool:
        return name in self.still

    def nodes(self) -> tuple[NodeStatus, ...]:
        return ()

    def interrupt(self, names: Sequence[str], generation: int) -> None:
        self.calls.append(("interrupt", generation, *names))

    def end(self, names: Sequence[str], seconds: float) -> None:
        self.calls.append(("end", *names))

    def stop_all(self, seconds: float) -> None:
        self.calls.append(("stop_all",))

    def close(self) -> None:
        self.calls.append(("close",))

    def let_go(self) -> None:
        os.close(self._read)
        os.close(self._write)


class Node:
    """One node besides the first: its agent's loop, turned by hand."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.number, self.clock, self.hands = number, FakeClock(), Hands()
        self.clock.advance(1000.0 * number)  # its machine was started at another time
        self.asked: Notice | None = None
        cluster.everybody.append(self)
        self.spec, self.run = cluster.spec, cluster.run
        self.place = self._take(number) if number < cluster.spec.nodes else None
        self.link: Any = None

        def join() -> None:
            self.link = find_controller(
                cluster.run, number, address="127.0.0.1", clock=self.clock, timeout_seconds=_TIMEOUT_SECONDS,
                patience_seconds=10.0,
            )  # fmt: skip

        joining = threading.Thread(target=join)
        joining.start()
        deadline = time.monotonic() + 20
        try:
            while joining.is_alive() and time.monotonic() < deadline:
                cluster.turn()
        finally:
            joining.join(20)
        self.follower = Follower(
            self.place, take=self._take, link=self.link, host=self.hands, clock=self.clock, asked=lambda: self.asked
        )

    def _take(self, number: int) -> Place:
        page = open_page(self.run.node(number), self.spec, resume=False)
        self.place = Place(page=page, environment={"PLACE": str(number)})
        return self.place

    @property
    def page(self) -> Page:
        assert self.place is not None
        return self.place.page

    def end(self) -> None:
        self.hands.let_go()
        if self.link is not None:
            self.link.close()

    def starts(self) -> list[str]:
        return [call[1] for call in self.hands.calls if call[0] == "start"]


class Cluster:
    """A controller of `count` nodes with two ranks each. `started`: what it had started by the back-end."""

    def __init__(self, folder: pathlib.Path, count: int, spares: int, **spec: Any) -> None:
        self.run = RunDir(folder / "run")
        self.run.create()
        self.spec = RunSpec(
            id="run", name="train", created=0.0, backend="local", world_size=2 * count, gpus_per_node=2,
            accelerator="cpu", seed=1, tracking=Tracking(uri="", experiment=""), python="", working_dir="/",
            spares=spares, **spec,
        )  # fmt: skip
        for number in range(1, count + spares):
            self.run.node(number).root.mkdir()
        self.page = Page.create(self.run.heartbeat, self.spec.world_size)
        self.clock, self.hands = FakeClock(), Hands()
        self.started: list[int] = []
        self.replaced: list[tuple[int, int]] = []
        listening = Nodes("127.0.0.1", count - 1 + spares, clock=self.clock, timeout_seconds=_TIMEOUT_SECONDS)
        self.listening = listening
        self.host = ClusterHost(
            self.run, self.spec, local=self.hands, nodes=listening, page=self.page, clock=self.clock,
            starter=_Started(self), join_seconds=30.0,
        )  # fmt: skip
        listening.publish(self.run)
        self.nodes: list[Node] = []  # those that turn
        self.everybody: list[Node] = []
        self.exits: list[Exit] = []

    def join(self, *numbers: int) -> list[Node]:
        for number in numbers:
            self.nodes.append(Node(self, number))
        return self.nodes[-len(numbers) :]

    def turn(self) -> None:
        for node in self.nodes:
            node.follower.turn()
        self.exits += self.host.wait(0.0)

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not come true"
            self.turn()

    def up(self) -> list[Node]:
        """Everybody is there and ready."""
        joined = self.join(*range(1, self.spec.nodes))
        for hands in (self.hands, *(node.hands for node in joined)):
            hands.is_ready = True
        self.until(self.host.ready)
        return joined

    def start(self, generation: int = 0) -> None:
        for rank in range(self.spec.world_size):
            self.host.start(
                f"rank{rank}.g{generation}", rank=rank, generation=generation, environment={"RANK": str(rank)},
                log=self.run.log(generation, rank),
            )  # fmt: skip

    def stop_all(self) -> None:
        """`stop_all` waits for the nodes, so they turn beside it."""
        self.beside(threading.Thread(target=self.host.stop_all, args=(2.0,)))

    def beside(self, stopping: threading.Thread) -> None:
        stopping.start()
        deadline = time.monotonic() + 20
        while stopping.is_alive() and time.monotonic() < deadline:
            for node in self.nodes:
                if not node.hands.ignores_stop:
                    node.follower.turn()
            others = [node.hands for node in self.nodes if not node.hands.ignores_stop]
            if len(others) < len(self.nodes) and all(("stop_all",) in hands.calls for hands in others):
                self.clock.advance(0.01)
                stopping.join(0.001)
        stopping.join(20)
        assert not stopping.is_alive()

    def kinds(self) -> list[str]:
        return [event["kind"] for event in read_all(self.run.events)]

    def end(self) -> None:
        self.listening.close()
        self.hands.let_go()
        for node in self.everybody:
            node.end()


class _Started:
    """Notes which agents the controller wants started."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def start(self, node: int) -> None:
        self._cluster.started.append(node)

    def replace(self, node: int, spare: int) -> None:
        self._cluster.replaced.append((node, spare))


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(count: int = 2, spares: int = 0, **spec: Any) -> Cluster:
        made.append(Cluster(tmp_path, count, spares, **spec))
        return made[-1]

    yield make
    for each in made:
        each.end()


def test_all_nodes_have_to_be_ready(cluster: Callable[..., Cluster]) -> None:
    run = cluster(3)
    run.hands.is_ready = True
    first, second = run.join(1, 2)
    first.hands.is_ready = True
    run.until(lambda: run.host.nodes()[1].state == "ready")
    assert not run.host.ready()
    second.hands.is_ready = True
    run.until(run.host.ready)
    assert [each.node for each in run.host.nodes()] == [0, 1, 2]
    assert {each.state for each in run.host.nodes()} == {"ready"}
    joined = [event for event in read_all(run.run.events) if event["kind"] == "node_joined"]
    assert [(event["node"], event["address"]) for event in joined] == [(1, "127.0.0.1"), (2, "127.0.0.1")]


def test_each_rank_starts_on_its_node(cluster: Callable[..., Cluster]) -> None:
    run = cluster(3)
    first, second = run.up()
    assert run.host.open_store("store0") == 29500
    run.start()
    run.until(lambda: len(first.starts()) + len(second.starts()) == 4)
    assert [call[:2] for call in run.hands.calls] == [("store", "store0"), ("start", "rank0.g0"), ("start", "rank1.g0")]
    assert first.starts() == ["rank2.g0", "rank3.g0"]
    assert second.starts() == ["rank4.g0", "rank5.g0"]
    assert second.hands.calls[-1] == ("start", "rank5.g0", 5, 0, "5", str(run.run.log(0, 5)))


def test_what_ends_on_a_node_is_told_with_how_far_it_came(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (node,) = run.up()
    run.start()
    run.until(lambda: len(node.starts()) == 2)
    node.page.slot(3).start(0)
    node.page.slot(3).beat(41, epoch=2)
    node.hands.exits = [Exit(name="rank3.g0", status=9, out_of_memory=True)]
    run.until(lambda: run.exits)
    assert run.exits == [Exit(name="rank3.g0", status=9, out_of_memory=True)]
    beat = run.page.slot(3).read()
    assert (beat.step, beat.high_step, beat.epoch, beat.generation) == (41, 41, 2, 0)


def test_beats_of_another_machine_are_in_our_time(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (node,) = run.up()
    run.start()
    run.until(lambda: len(node.starts()) == 2)
    slot = node.page.slot(2)
    slot.start(0)
    slot.beat(5)
    beat = slot.read()
    shift_ns = int((run.clock.monotonic() - node.clock.monotonic()) * 1e9)
    assert shift_ns < -900e9
    node.clock.advance(1.0)
    run.clock.advance(1.0)
    run.until(lambda: run.page.slot(2).read().step == 5)
    seen = run.page.slot(2).read()
    for name in ("beat_ns", "section_since_ns", "ledger_since_ns", "started_ns"):
        assert abs(getattr(seen, name) - getattr(beat, name) - shift_ns) < 5e9, name
    assert seen.seconds == beat.seconds


def test_a_rank_takes_what_it_has_reached_along(cluster: Callable[..., Cluster]) -> None:
    """Where its time went and its highest step, to a node where it never ran, in that node's time."""
    run = cluster(2)
    (node,) = run.up()
    slot = run.page.slot(3)
    slot.start(0)
    slot.account(Category.PRODUCTIVE)
    slot.beat(41)
    slot.account(Category.DATA)
    run.start()
    run.until(lambda: len(node.starts()) == 2)
    before, there = slot.read(), node.page.slot(3).read()
    assert (there.high_step, there.seconds, there.category) == (41, before.seconds, Category.DATA)
    shift_ns = int((node.clock.monotonic() - run.clock.monotonic()) * 1e9)
    assert abs(there.ledger_since_ns - before.ledger_since_ns - shift_ns) < 5e9


def test_requests_go_down_once_with_the_time_that_is_left(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (node,) = run.up()
    deadline_ns = int((run.clock.monotonic() + 30) * 1e9)
    for rank in range(4):
        run.page.slot(rank).request(Request.SAVE_AND_STOP, stop_step=77, deadline_ns=deadline_ns)
    run.until(lambda: node.page.slot(3).requested().what is Request.SAVE_AND_STOP)
    asked = node.page.slot(3).requested()
    assert asked.stop_step == 77
    assert abs(asked.deadline_ns / 1e9 - node.clock.monotonic() - 30) < 5.0
    node.page.slot(3).request(Request.NONE)
    for _ in range(20):
        run.turn()
    assert node.page.slot(3).requested().what is Request.NONE, "it was told once"


def test_signals_and_standing_still(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (node,) = run.up()
    run.start()
    run.host.signal("rank2.g0", signal.SIGUSR2)
    run.host.examine("rank3.g0", pathlib.Path("/shared/process"))
    node.hands.still.add("rank3.g0")
    run.until(lambda: len(node.starts()) == 2)
    node.clock.advance(1.0)
    run.until(lambda: run.host.stopped("rank3.g0"))
    assert ("signal", "rank2.g0", signal.SIGUSR2) in node.hands.calls
    assert ("examine", "rank3.g0", pathlib.Path("/shared/process")) in node.hands.calls
    assert not run.host.stopped("rank2.g0")


def test_all_are_stopped_before_it_goes_on(cluster: Callable[..., Cluster]) -> None:
    run = cluster(3)
    nodes = run.up()
    run.start()
    run.exits.clear()
    nodes[0].hands.exits = [Exit(name="rank2.g0", status=0)]
    run.stop_all()
    for hands in (run.hands, nodes[0].hands, nodes[1].hands):
        assert hands.calls[-1] == ("stop_all",)
    assert run.host.wait(0.0) == [], "what ended because it was stopped is nobody's failure"
    assert run.host.ready()


def test_some_workers_are_told_to_park_and_some_are_ended_on_their_nodes(cluster: Callable[..., Cluster]) -> None:
    """Nodes that have none of them are not asked, nor waited for."""
    run = cluster(3)
    nodes = run.up()
    run.start()
    run.host.interrupt(["rank1.g0", "rank2.g0", "rank3.g0"], 0)
    run.until(lambda: ("interrupt", 0, "rank2.g0", "rank3.g0") in nodes[0].hands.calls)
    assert ("interrupt", 0, "rank1.g0", "rank2.g0", "rank3.g0") in run.hands.calls
    nodes[1].hands.ignores_stop = True
    run.beside(threading.Thread(target=run.host.end, args=(["rank3.g0", "store0"], 30.0)))
    assert nodes[0].hands.calls[-1] == ("end", "rank3.g0")
    assert run.hands.calls[-1] == ("end", "rank3.g0", "store0")
    assert not any(call[0] in ("interrupt", "end", "stop_all") for call in nodes[1].hands.calls)


def test_a_parked_worker_begins_anew_on_its_node(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (node,) = run.up()
    run.start()
    run.until(lambda: len(node.starts()) == 2)
    node.page.slot(2).start(0)
    node.page.slot(2).fail(parked=True)
    run.until(lambda: run.page.slot(2).read().state is WorkerState.PARKED)
    run.host.start(
        "rank2.g1", rank=2, generation=1, environment={"RANK": "2"}, log=run.run.log(1, 2), parked="rank2.g0"
    )
    run.until(lambda: len(node.starts()) == 3)
    assert node.hands.calls[-1][:5] == ("start", "rank2.g1", 2, 1, "2")
    assert node.hands.calls[-1][-1] == "rank2.g0"


def test_a_node_that_does_not_stop_its_workers_is_replaced(cluster: Callable[..., Cluster]) -> None:
    run = cluster(3)
    first, second = run.up()
    second.hands.ignores_stop = True
    run.stop_all()
    assert run.started == [2]
    assert "node 2 was lost: it did not end its workers within 2 s" in [
        event.get("message") for event in read_all(run.run.events)
    ]
    run.nodes = [first]
    assert run.host.wait(0.0) == [], "it is part of the failure that is being dealt with"
    assert not run.host.ready()
    with pytest.raises(LinkLostError):
        _turn_until_lost(second)


def _turn_until_lost(node: Node) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        node.follower.turn()


def test_a_lost_node_is_told_started_anew_and_taken_back(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (node,) = run.up()
    run.nodes.clear()
    node.link.close()
    with pytest.raises(NodeLostError, match="node 1 was lost: its connection was closed") as caught:
        run.until(lambda: False)
    assert caught.value.node == 1
    assert run.started == [1]
    assert not run.host.ready()
    assert run.host.nodes()[1] == NodeStatus(node=1, address=None, state="away")
    run.host.reopen()
    assert run.host.wait(0.0) == [], "told once"
    (again,) = run.join(1)
    again.hands.is_ready = True
    run.until(run.host.ready)
    assert run.started == [1]
    assert run.kinds() == ["node_joined", "node_lost", "node_joined"]


def test_a_silent_node_is_lost(cluster: Callable[..., Cluster]) -> None:
    """Its agent is frozen, or the network between drops everything: nothing is closed."""
    run = cluster(2)
    run.up()
    frozen, run.nodes = run.nodes, []
    run.clock.advance(_TIMEOUT_SECONDS + 0.5)
    with pytest.raises(NodeLostError, match=r"node 1 was lost: it was silent for 5\.5 s \(limit 5 s\)"):
        run.until(lambda: False)
    assert run.started == [1]
    run.nodes = frozen
    with pytest.raises(LinkLostError):
        _turn_until_lost(frozen[0])


def _as_time_goes_by(run: Cluster, node: Node, condition: Callable[[], bool]) -> None:
    """What is told with the next beat comes only when there is one: both clocks go on while it is waited for."""
    last = time.monotonic()

    def check() -> bool:
        nonlocal last
        now = time.monotonic()
        for clock in (run.clock, node.clock):
            clock.advance(now - last)
        last = now
        return condition()

    run.until(check)


def test_dropped_packets_are_a_loss_on_both_sides(cluster: Callable[..., Cluster]) -> None:
    """Half-open: neither side is told anything, and what it sends is taken."""
    run = cluster(2)
    told = read_controller(run.run)
    assert told is not None
    with FaultyProxy(told.host, told.port) as between:
        dataclasses.replace(told, port=between.port).write(run.run.controller)
        (node,) = run.up()
        run.start()
        run.until(lambda: len(node.starts()) == 2)
        for step in range(1, 15):  # longer than the time-out, in all
            run.clock.advance(0.5)
            node.clock.advance(0.5)
            node.page.slot(2).beat(step)
            run.page.slot(2).request(Request.SAVE_AND_STOP, stop_step=step)
            _as_time_goes_by(run, node, lambda step=step: run.page.slot(2).read().step == step)
            _as_time_goes_by(run, node, lambda step=step: node.page.slot(2).requested().stop_step == step)
        between.swallow()
        run.nodes = []
        run.clock.advance(_TIMEOUT_SECONDS + 0.5)
        node.clock.advance(_TIMEOUT_SECONDS + 0.5)
        with pytest.raises(NodeLostError, match="node 1 was lost: it was silent"):
            run.until(lambda: False)
        with pytest.raises(LinkLostError, match="it was silent"):
            _turn_until_lost(node)
    assert run.started == [1]


def test_nodes_lost_at_once_are_one_failure(cluster: Callable[..., Cluster]) -> None:
    run = cluster(4)
    run.up()
    lost = run.nodes[1:]
    run.nodes = []
    for node in lost:
        node.link.close()
        run.clock.advance(0.5)
    with pytest.raises(NodeLostError) as caught:
        run.until(lambda: False)
    run.host.reopen()
    assert "node 2 was lost" in str(caught.value)
    assert sorted(run.started) in ([2, 3], [2])
    if "node 3 was lost" not in str(caught.value):  # its end came a moment later
        with pytest.raises(NodeLostError, match="node 3 was lost"):
            run.until(lambda: False)


def test_a_node_whose_zygote_ended_makes_itself_ready_again(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (node,) = run.up()
    node.hands.lost = "the process that starts workers ended"
    with pytest.raises(ZygoteLostError, match="node 1: the process that starts workers ended") as caught:
        run.until(lambda: False)
    assert caught.value.node == 1
    assert not run.host.ready()
    node.hands.is_ready = False
    run.host.reopen()
    run.until(lambda: ("reopen",) in node.hands.calls)
    assert ("reopen",) not in run.hands.calls
    assert not run.host.ready()
    node.hands.is_ready = True
    run.until(run.host.ready)
    assert run.started == []


def test_the_first_nodes_own_zygote(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (node,) = run.up()
    run.hands.lost = "it ended"
    with pytest.raises(ZygoteLostError, match="it ended"):
        run.until(lambda: False)
    run.host.reopen()
    assert ("reopen",) in run.hands.calls
    assert ("reopen",) not in node.hands.calls
    run.until(run.host.ready)


def test_a_node_that_does_not_come_is_started_again(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    run.clock.advance(29.0)
    assert run.host.wait(0.0) == []
    run.clock.advance(2.0)
    with pytest.raises(NodeLostError, match="its agent did not come within 30 s"):
        run.host.wait(0.0)
    assert run.started == [1]
    run.host.reopen()
    run.clock.advance(29.0)
    assert run.host.wait(0.0) == []


def _with_spare(run: Cluster) -> tuple[Node, Node]:
    node, spare = run.join(1, 2)
    for hands in (run.hands, node.hands, spare.hands):
        hands.is_ready = True
    run.until(lambda: all(each.state == "ready" for each in run.host.nodes()))
    return node, spare


def test_a_spare_takes_a_lost_nodes_place(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2, spares=1)
    node, spare = _with_spare(run)
    run.start()
    run.until(lambda: len(node.starts()) == 2)
    node.page.slot(3).start(0)
    node.page.slot(3).beat(9)
    assert spare.starts() == []
    run.nodes = [spare]
    node.link.close()
    with pytest.raises(NodeLostError, match="node 1 was lost"):
        run.until(lambda: False)
    run.host.reopen()
    assert (run.replaced, run.started) == ([(1, 2)], [])
    assert run.host.ready(), "at once"
    run.stop_all()
    assert [(each.node, each.state) for each in run.host.nodes()] == [(0, "ready"), (1, "ready"), (2, "away")]
    run.start(1)
    run.until(lambda: len(spare.starts()) == 2)
    assert spare.starts() == ["rank2.g1", "rank3.g1"]
    assert spare.page.slot(3).read().high_step == 9, "what the rank had reached is known there"
    spare.page.slot(3).start(1)
    spare.page.slot(3).beat(11)
    spare.hands.exits = [Exit(name="rank3.g1", status=0)]
    run.exits.clear()
    run.until(lambda: run.exits)
    assert run.page.slot(3).read().step == 11
    assert run.kinds() == ["node_joined", "node_joined", "node_lost", "node_joined"]


def test_those_that_are_left_can_go_on(cluster: Callable[..., Cluster]) -> None:
    """Node 1 of 3 is lost: node 2 has its ranks until it is back."""
    run = cluster(3)
    assert run.host.members() == ()
    first, second = run.up()
    assert run.host.members() == (0, 1, 2)
    run.start()
    run.until(lambda: len(second.starts()) == 2)
    run.nodes = [second]
    first.link.close()
    with pytest.raises(NodeLostError, match="node 1 was lost"):
        run.until(lambda: False)
    run.host.reopen()
    run.stop_all()
    assert not run.host.ready()
    assert run.host.members() == (0, 2)
    run.host.begin((0, 2))
    for rank in range(4):
        run.host.start(
            f"rank{rank}.g1", rank=rank, generation=1, environment={"RANK": str(rank)}, log=run.run.log(1, rank)
        )
    run.until(lambda: len(second.starts()) == 4)
    assert second.starts()[2:] == ["rank2.g1", "rank3.g1"]
    second.page.slot(3).start(1)
    second.page.slot(3).beat(12)
    second.hands.exits = [Exit(name="rank3.g1", status=0)]
    run.exits.clear()
    run.until(lambda: run.exits)
    assert run.page.slot(3).read().step == 12
    run.page.slot(2).request(Request.SAVE_AND_STOP, stop_step=20)
    run.until(lambda: second.page.slot(2).requested().stop_step == 20)
    run.page.slot(2).request(Request.NONE)
    run.until(lambda: second.page.slot(2).requested().what is Request.NONE)

    (again,) = run.join(1)
    run.until(lambda: run.host.nodes()[1].state == "here")
    assert run.host.members() == (), "it is here, and will be ready soon"
    again.hands.is_ready = True
    run.until(run.host.ready)
    assert run.host.members() == (0, 1, 2)


def test_a_spare_that_is_lost_is_no_failure(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2, spares=1)
    node, spare = _with_spare(run)
    spare.hands.lost = "its zygote ended"
    run.until(lambda: ("reopen",) in spare.hands.calls)
    run.until(lambda: run.host.nodes()[2].state == "ready")
    run.nodes = [node]
    spare.link.close()
    run.until(lambda: run.started)
    assert run.started == [2]
    assert run.host.ready()
    run.nodes = []
    node.link.close()
    with pytest.raises(NodeLostError, match="node 1 was lost"):
        run.until(lambda: False)
    assert run.started == [2, 1], "there is no spare any more"
    assert run.replaced == []


def test_the_newest_agent_of_a_node_is_the_one(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (old,) = run.up()
    run.nodes.clear()
    with pytest.raises(NodeLostError, match="another agent has taken its place"):
        run.join(1)
    with pytest.raises(LinkLostError):
        _turn_until_lost(old)


def test_a_node_that_is_to_be_given_back_stops_the_run(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (node,) = run.up()
    assert run.host.notice() is None
    node.asked = Notice(cause="SIGTERM", deadline=5.0)
    run.until(run.host.notice)
    assert run.host.notice() == Notice(cause="node 1: SIGTERM", deadline=5.0)


def test_the_end_waits_for_the_nodes(cluster: Callable[..., Cluster]) -> None:
    run = cluster(2)
    (node,) = run.up()
    closing = threading.Thread(target=run.host.close)
    closing.start()
    node.follower.serve()
    assert closing.is_alive(), "the node has not closed its end yet"
    node.link.close()
    closing.join(10)
    assert not closing.is_alive()
    assert run.hands.calls[-1] == ("close",)


def test_a_node_without_a_controller(tmp_path: pathlib.Path) -> None:
    run, clock = RunDir(tmp_path / "run"), FakeClock()
    run.create()

    def find() -> object:
        return find_controller(run, 1, address="", clock=clock, timeout_seconds=_TIMEOUT_SECONDS, patience_seconds=60.0)

    with pytest.raises(LinkLostError, match=r"node 1 found no controller within 60 s: there is no .*controller\.json"):
        find()
    run.controller.write_text('{"host": "127.0.0.1", "port": 1, "token": "x", "version": 1}')
    with pytest.raises(LinkLostError, match=r"there is no controller at 127\.0\.0\.1:1"):
        find()
    Status(state="FAILED", updated=0.0).write(run)
    assert find() is None, "nothing is to be done any more"


@pytest.mark.parametrize(("fewest", "goes_on"), [(None, False), (6, False), (4, True)])
def test_a_node_that_is_not_fit_is_done_without_where_that_is_allowed(
    cluster: Callable[..., Cluster], fewest: int | None, goes_on: bool
) -> None:
    one = cluster(3, restarts=RestartPolicy(min_gpus=fewest))
    one.join(1, 2)
    one.hands.is_ready = one.nodes[1].hands.is_ready = True
    one.nodes[0].hands.unfit = "this node is not fit: gpu 3: ECC"
    with pytest.raises(NodeUnfitError, match=r"node 1 is left out.*gpu 3: ECC") as caught:
        one.until(lambda: False)
    assert (caught.value.node, caught.value.unrecoverable) == (1, not goes_on)
    one.host.reopen()
    one.until(lambda: one.host.members() == (0, 2))
    assert not one.host.ready()
    assert one.started == [], "another agent in the same place would find the same"


def test_a_spare_takes_the_place_of_a_node_that_is_not_fit(cluster: Callable[..., Cluster]) -> None:
    one = cluster(2, spares=1)
    one.join(1, 2)
    one.hands.is_ready = one.nodes[1].hands.is_ready = True
    one.until(lambda: one.host._remotes[2].ready)
    unfit = one.nodes.pop(0)
    unfit.hands.unfit = "this node is not fit: gpu 3: ECC"
    unfit.follower.turn()
    with pytest.raises(NodeLostError, match="gpu 3: ECC"):
        one.until(lambda: False)
    one.host.reopen()
    one.until(one.host.ready)
    assert one.replaced == [(1, 2)]
