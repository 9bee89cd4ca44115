"""All nodes of a run as one `WorkerHost`: workers of this node by its own, those of others by word to their agents."""

from __future__ import annotations

import pathlib
import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sgpu.agent import wire
from sgpu.agent.nodes import Arrival, Departure, News, Nodes
from sgpu.agent.wire import Message
from sgpu.agent.workers import Exit, HostLostError, LocalHost, NodeLostError, ZygoteLostError
from sgpu.contract.clock import Clock
from sgpu.contract.events import emit
from sgpu.contract.heartbeat import Asked, Page, Request
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.contract.status import NodeStatus

JOIN_SECONDS = 120.0  # a node has to import Python and connect; it may have to be found first
_LOOK_SECONDS = 0.05
_LEAVE_SECONDS = 70.0  # its checkpoint helper finishes what is in hand


@dataclass(kw_only=True)
class _Remote:
    """What is known of another node.

    Attributes:
        awaited_since: when its agent was (last) started, monotonic.
        shift_ns: what its monotonic clock lacks to ours.
        stopped: the newest of our `stop` commands that it has carried out.
        lost: the reason, while the process that its workers are forked from is gone.
        still: names of its stopped workers.
        asked: what its ranks were last told.
    """

    node: int
    awaited_since: float
    address: str | None = None
    ready: bool = False
    shift_ns: int | None = None
    stopped: int = 0
    lost: str | None = None
    still: frozenset[str] = frozenset()
    asked: dict[int, Asked] = field(default_factory=dict)

    @property
    def told(self) -> NodeStatus:
        state: Literal["ready", "here", "away"] = "ready" if self.ready else "here" if self.address else "away"
        return NodeStatus(node=self.node, address=self.address, state=state)


class ClusterHost:
    """The controller's hands.

    The run's page mirrors those of the other nodes: beats come up, requests go down. A node that is lost ends with its
    workers, is told as a HostLostError, and is started anew at once.
    """

    def __init__(
        self,
        run: RunDir,
        spec: RunSpec,
        *,
        local: LocalHost,
        nodes: Nodes,
        page: Page,
        clock: Clock,
        start_node: Callable[[int], None],
        join_seconds: float = JOIN_SECONDS,
    ) -> None:
        self._run, self._spec, self._local, self._nodes, self._page = run, spec, local, nodes, page
        self._clock, self._start_node, self._join_seconds = clock, start_node, join_seconds
        self._remotes = {k: _Remote(node=k, awaited_since=clock.monotonic()) for k in range(1, spec.nodes)}
        self._generation = 0
        self._stops = 0
        self._exits: list[Exit] = []
        self._losses: list[HostLostError] = []
        self._asked: str | None = None

    # ---- as a WorkerHost

    def open(self) -> None:
        self._local.open()

    def reopen(self) -> None:
        """What was lost; a lost node has been started anew already."""
        if any(loss.node == 0 for loss in self._losses):
            self._local.reopen()
        for remote in self._remotes.values():
            if remote.lost is not None:
                remote.lost = None
                self._nodes.send(remote.node, {"op": "reopen"})
        self._losses.clear()

    def ready(self) -> bool:
        return self._local.ready() and all(remote.ready for remote in self._remotes.values())

    def open_store(self, name: str) -> int:
        return self._local.open_store(name)

    def start(
        self, name: str, *, rank: int, generation: int, environment: Mapping[str, str], log: pathlib.Path
    ) -> None:
        self._generation = generation
        node = rank // self._spec.gpus_per_node
        if node == 0:
            self._local.start(name, rank=rank, generation=generation, environment=environment, log=log)
            return
        self._nodes.send(node, {
            "op": "start", "name": name, "rank": rank, "generation": generation, "environment": dict(environment),
            "log": str(log),
        })  # fmt: skip

    def wait(self, seconds: float) -> list[Exit]:
        deadline = self._clock.monotonic() + seconds
        while True:
            self._turn()
            left = deadline - self._clock.monotonic()
            if self._exits or self._losses or left <= 0:
                break
            self._await(left)
        if self._losses:
            raise self._loss()
        exits, self._exits = self._exits, []
        return exits

    def signal(self, name: str, number: int) -> None:
        self._local.signal(name, number)
        for node in self._remotes:
            self._nodes.send(node, {"op": "signal", "name": name, "number": number})

    def stopped(self, name: str) -> bool:
        return self._local.stopped(name) or any(name in remote.still for remote in self._remotes.values())

    def nodes(self) -> tuple[NodeStatus, ...]:
        own = NodeStatus(node=0, address=self._nodes.address, state="ready" if self._local.ready() else "here")
        return own, *(each.told for each in self._remotes.values())

    def stop_all(self, seconds: float) -> None:
        self._stops += 1
        deadline = self._clock.monotonic() + seconds
        for node in self._remotes:
            self._nodes.send(node, {"op": "stop", "number": self._stops, "seconds": seconds})
        self._local.stop_all(seconds)
        while (late := self._not_stopped()) and self._clock.monotonic() < deadline:
            self._await(deadline - self._clock.monotonic())
            self._turn()
        for node in late:
            self._take(self._nodes.drop(node, f"it did not end its workers within {seconds:g} s"))
        self._exits.clear()
        # A node that was lost by now is part of the failure that is being dealt with; it has been started anew.
        self._losses = [loss for loss in self._losses if isinstance(loss, ZygoteLostError)]

    def close(self) -> None:
        deadline = self._clock.monotonic() + _LEAVE_SECONDS
        for node in self._remotes:
            self._nodes.send(node, {"op": "end"})
        self._local.close()
        while any(map(self._nodes.present, self._remotes)) and self._clock.monotonic() < deadline:
            self._nodes.look()
            _poll(self._nodes.filenos(), _LOOK_SECONDS)
        self._nodes.close()

    # ---- besides

    def stop_reason(self) -> str | None:
        """What another node was told from outside: "preempt", or None."""
        return self._asked

    def _await(self, seconds: float) -> None:
        _poll([self._local.fileno(), *self._nodes.filenos()], min(seconds, _LOOK_SECONDS))

    def _turn(self) -> None:
        """Takes in what has happened, everywhere."""
        try:
            if not any(loss.node == 0 for loss in self._losses):
                self._exits += self._local.wait(0.0)
        except ZygoteLostError as error:
            self._losses.append(ZygoteLostError(str(error), node=0))
        for news in self._nodes.look():
            self._take(news)
        now = self._clock.monotonic()
        for remote in self._remotes.values():
            self._pass_on_requests(remote)
            if remote.address is None and now - remote.awaited_since > self._join_seconds:
                self._lose(remote, f"its agent did not come within {self._join_seconds:g} s")

    def _take(self, news: News) -> None:
        remote = self._remotes[news.node]
        if isinstance(news, Arrival):
            remote.address = news.address
            emit(
                self._run, "node_joined", generation=self._generation, node=remote.node, address=news.address,
                seconds=self._clock.monotonic() - remote.awaited_since,
            )  # fmt: skip
        elif isinstance(news, Departure):
            self._lose(remote, news.reason)
        else:
            self._hear(remote, news.message)

    def _lose(self, remote: _Remote, reason: str) -> None:
        message = f"node {remote.node} was lost: {reason}"
        emit(self._run, "node_lost", generation=self._generation, node=remote.node, message=message)
        self._losses.append(NodeLostError(message, node=remote.node))
        self._remotes[remote.node] = _Remote(
            node=remote.node, awaited_since=self._clock.monotonic(), stopped=self._stops
        )
        self._start_node(remote.node)

    def _hear(self, remote: _Remote, message: Message) -> None:
        operation = message["op"]
        if operation == "beat":
            self._mirror(remote, message)
        elif operation == "ready":
            remote.ready = True
        elif operation == "exited":
            exit_facts = {name: message[name] for name in ("name", "status", "out_of_memory")}
            self._exits.append(Exit(**exit_facts))
        elif operation == "stopped":
            remote.stopped = message["number"]
        elif operation == "lost":
            remote.ready, remote.lost = False, message["message"]
            self._losses.append(ZygoteLostError(f"node {remote.node}: {remote.lost}", node=remote.node))
        elif operation == "asked":
            self._asked = message["reason"]

    def _mirror(self, remote: _Remote, message: Message) -> None:
        shift_ns = int(self._clock.monotonic() * 1e9) - message["now_ns"]
        remote.shift_ns = shift_ns if remote.shift_ns is None else min(shift_ns, remote.shift_ns)  # the least delayed
        remote.still = frozenset(message["still"])
        for rank in self._spec.ranks_of(remote.node):
            beat = message["ranks"].get(str(rank))
            if beat is not None:
                self._page.slot(rank).mirror(wire.beat_from_json(beat, shift_ns=remote.shift_ns))

    def _pass_on_requests(self, remote: _Remote) -> None:
        for rank in self._spec.ranks_of(remote.node):
            asked = self._page.slot(rank).requested()
            if asked.what is Request.NONE or asked == remote.asked.get(rank) or remote.address is None:
                continue
            remote.asked[rank] = asked
            left = asked.deadline_ns / 1e9 - self._clock.monotonic() if asked.deadline_ns else 0.0
            self._nodes.send(remote.node, {
                "op": "ask", "rank": rank, "what": int(asked.what), "stop_step": asked.stop_step, "seconds": left,
            })  # fmt: skip

    def _not_stopped(self) -> list[int]:
        return [k for k, remote in self._remotes.items() if self._nodes.present(k) and remote.stopped < self._stops]

    def _loss(self) -> HostLostError:
        """All that was lost at once is one failure."""
        first = self._losses[0]
        if len(self._losses) == 1:
            return first
        return NodeLostError("; ".join(map(str, self._losses)), node=first.node)


def _poll(descriptors: list[int], seconds: float) -> None:
    """Comes back when one is readable, or after `seconds`."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(max(0.0, seconds) * 1000)
