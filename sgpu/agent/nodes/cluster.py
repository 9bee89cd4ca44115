"""All nodes of a run as one `WorkerHost`: workers of this node by its own, those of others by word to their agents."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence

from sgpu.agent.nodes import wire
from sgpu.agent.nodes.connections import Arrival, Departure, News, Nodes, poll
from sgpu.agent.nodes.remote import Remote, Whereabouts
from sgpu.agent.nodes.roster import Roster
from sgpu.agent.nodes.starter import Starter
from sgpu.agent.nodes.wire import Message
from sgpu.agent.notices import Notice
from sgpu.agent.workers import Exit, HostLostError, LocalHost, NodeLostError, NodeUnfitError, ZygoteLostError, all_lost
from sgpu.contract.clock import Clock
from sgpu.contract.events import emit
from sgpu.contract.heartbeat import Page
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.contract.status import NodeStatus

JOIN_SECONDS = 120.0  # a node has to import Python and connect; it may have to be found first
_LOOK_SECONDS = 0.05
_LEAVE_SECONDS = 70.0  # its checkpoint helper finishes what is in hand


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
        starter: Starter,
        join_seconds: float = JOIN_SECONDS,
    ) -> None:
        self._stops = 0
        self._run, self._spec, self._local, self._nodes, self._page = run, spec, local, nodes, page
        self._clock, self._starter, self._join_seconds = clock, starter, join_seconds
        self._roster = Roster(spec, clock)
        self._remotes = self._roster.remotes
        self._generation = 0
        self._where = Whereabouts()
        self._exits: list[Exit] = []
        self._losses: list[HostLostError] = []
        self._asked: Notice | None = None

    # ---- as a WorkerHost

    def open(self) -> None:
        self._local.open()

    def reopen(self) -> None:
        """What was lost; a lost node has been started anew already."""
        if any(loss.node == 0 for loss in self._losses):
            self._local.reopen()
        for remote in self._remotes.values():
            if remote.lost is not None:
                self._reopen(remote)
        self._losses.clear()

    def ready(self) -> bool:
        return self._local.ready() and self._roster.ready

    def members(self) -> tuple[int, ...]:
        here = self._roster.here() if self._local.ready() else None
        return (0, *here) if here is not None else ()

    def room(self, wanted: int) -> int:
        """Nodes are alike: one with fewer fit GPUs is left out whole."""
        return wanted

    def begin(self, members: tuple[int, ...]) -> None:
        self._roster.begin(members)

    def open_store(self, name: str) -> int:
        return self._local.open_store(name)

    def start(
        self, name: str, *, rank: int, generation: int, environment: Mapping[str, str], log: pathlib.Path,
        parked: str | None = None,
    ) -> None:  # fmt: skip
        self._generation = generation
        node = self._roster.members[rank // self._spec.gpus_per_node]
        self._where.note(name, node, generation)
        if node == 0:
            self._local.start(name, rank=rank, generation=generation, environment=environment, log=log, parked=parked)
            return
        self._nodes.send(node, {
            "op": "start", "name": name, "rank": rank, "generation": generation, "environment": dict(environment),
            "log": str(log), "parked": parked, "beat": wire.beat_to_json(self._page.slot(rank).read()),
            "now_ns": int(self._clock.monotonic() * 1e9),
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
            raise all_lost(self._losses)
        exits, self._exits = self._exits, []
        return exits

    def signal(self, name: str, number: int) -> None:
        self._local.signal(name, number)
        for node in self._roster.others:
            self._nodes.send(node, {"op": "signal", "name": name, "number": number})

    def examine(self, name: str, into: pathlib.Path) -> None:
        self._local.examine(name, into)
        for node in self._roster.others:
            self._nodes.send(node, {"op": "examine", "name": name, "into": str(into)})

    def stopped(self, name: str) -> bool:
        return self._local.stopped(name) or any(name in remote.still for remote in self._remotes.values())

    def nodes(self) -> tuple[NodeStatus, ...]:
        own = NodeStatus(node=0, address=self._nodes.address, state="ready" if self._local.ready() else "here")
        return own, *(each.told for each in self._remotes.values())

    def interrupt(self, names: Sequence[str], generation: int) -> None:
        for node, there in self._where.elsewhere(names).items():
            self._nodes.send(node, {"op": "interrupt", "names": there, "generation": generation})
        self._local.interrupt(names, generation)

    def end(self, names: Sequence[str], seconds: float) -> None:
        self._stop(self._where.elsewhere(names), seconds, names)
        self._exits = [each for each in self._exits if each.name not in names]

    def stop_all(self, seconds: float) -> None:
        self._stop(dict.fromkeys(self._roster.others), seconds, None)
        self._exits.clear()
        # A node that was lost by now is part of the failure that is being dealt with; it has been started anew.
        self._losses = [loss for loss in self._losses if isinstance(loss, ZygoteLostError)]

    def _stop(self, nodes: Mapping[int, Sequence[str] | None], seconds: float, names: Sequence[str] | None) -> None:
        """`names`, and those of each node: only these."""
        self._stops += 1
        deadline = self._clock.monotonic() + seconds
        for node, there in nodes.items():
            self._nodes.send(node, {"op": "stop", "number": self._stops, "seconds": seconds, "names": there})
        if names is None:
            self._local.stop_all(seconds)
        else:
            self._local.end(names, seconds)
        while (late := self._not_stopped(nodes)) and self._clock.monotonic() < deadline:
            self._await(deadline - self._clock.monotonic())
            self._turn()
        for node in late:
            self._take(self._nodes.drop(node, f"it did not end its workers within {seconds:g} s"))

    def close(self) -> None:
        deadline = self._clock.monotonic() + _LEAVE_SECONDS
        for node in self._remotes:
            self._nodes.send(node, {"op": "end"})
        self._local.close()
        while any(map(self._nodes.present, self._remotes)) and self._clock.monotonic() < deadline:
            self._nodes.look()
            poll(self._nodes.filenos(), _LOOK_SECONDS)
        self._nodes.close()

    # ---- besides

    def notice(self) -> Notice | None:
        """What another node was told from outside."""
        return self._asked

    def _await(self, seconds: float) -> None:
        poll([self._local.fileno(), *self._nodes.filenos()], min(seconds, _LOOK_SECONDS))

    def _turn(self) -> None:
        """Takes in what has happened, everywhere."""
        try:
            if not any(loss.node == 0 for loss in self._losses):
                self._exits += self._local.wait(0.0)
        except ZygoteLostError as error:
            self._losses.append(type(error)(str(error), node=0))
        for news in self._nodes.look():
            self._take(news)
        now = self._clock.monotonic()
        for remote in list(self._remotes.values()):
            for request in remote.requests(self._page, now):
                self._nodes.send(remote.node, request)
            if remote.address is None and now - remote.awaited_since > self._join_seconds:
                self._lose(remote, f"its agent did not come within {self._join_seconds:g} s")

    def _take(self, news: News) -> None:
        remote = self._remotes[news.node]
        if isinstance(news, Arrival):
            remote.address, remote.missing = news.address, False
            emit(
                self._run, "node_joined", generation=self._generation, node=remote.node, address=news.address,
                seconds=self._clock.monotonic() - remote.awaited_since,
            )  # fmt: skip
        elif isinstance(news, Departure):
            self._lose(remote, news.reason)
        else:
            self._hear(remote, news.message)

    def _lose(self, remote: Remote, reason: str) -> None:
        """A spare takes its place if there is one; a spare that is lost itself is missed by nobody yet."""
        node = remote.node
        message = f"node {node} was lost: {reason}"
        emit(self._run, "node_lost", generation=self._generation, node=node, message=message)
        self._roster.miss(node, stops=self._stops)
        if node not in self._roster.others:
            self._starter.start(node)
            return
        self._losses.append(NodeLostError(message, node=node))
        spare = next(filter(self._nodes.present, self._roster.ready_spares()), None)
        if spare is None:
            self._starter.start(node)
            return
        self._nodes.renumber(spare, node)
        self._nodes.send(node, {"op": "be", "node": node})
        taken = self._roster.promote(spare, node, stops=self._stops)
        emit(self._run, "node_joined", generation=self._generation, node=node, address=taken.address, seconds=0.0)
        self._starter.replace(node, spare)

    def _leave_out(self, remote: Remote, reason: str) -> None:
        """A node whose health checks say no: as if lost, where a spare is there; else it is done without, if it can be.

        Its agent stays, so that nobody starts another one in the same place.
        """
        remote.ready = False
        if remote.node in self._roster.spares:
            return
        if self._roster.ready_spares():
            self._take(self._nodes.drop(remote.node, reason))
            return
        remote.missing = True
        message = f"node {remote.node} is left out: {reason}"
        emit(self._run, "node_lost", generation=self._generation, node=remote.node, message=message)
        self._losses.append(NodeUnfitError(message, node=remote.node, unrecoverable=not self._roster.enough))

    def _reopen(self, remote: Remote) -> None:
        remote.lost = None
        self._nodes.send(remote.node, {"op": "reopen"})

    def _hear(self, remote: Remote, message: Message) -> None:
        operation = message["op"]
        if operation == "beat":
            remote.mirror(message, self._page, self._clock.monotonic())
        elif operation == "ready":
            remote.ready = True
        elif operation == "exited":
            exit_facts = {name: message[name] for name in ("name", "status", "out_of_memory")}
            self._exits.append(Exit(**exit_facts))
        elif operation == "stopped":
            remote.stopped = message["number"]
        elif operation == "lost":
            remote.ready, remote.lost = False, message["message"]
            if remote.node in self._roster.spares:  # nobody works there
                self._reopen(remote)
                return
            self._losses.append(ZygoteLostError(f"node {remote.node}: {remote.lost}", node=remote.node))
        elif operation == "unfit":
            self._leave_out(remote, message["message"])
        elif operation == "asked":
            notice = Notice(cause=f"node {remote.node}: {message['cause']}", deadline=message["deadline"])
            self._asked = self._asked or notice

    def _not_stopped(self, nodes: Iterable[int]) -> list[int]:
        return [k for k in nodes if self._nodes.present(k) and self._remotes[k].stopped < self._stops]
