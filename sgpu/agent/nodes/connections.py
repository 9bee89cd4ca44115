"""The controller's connections to the agents of the other nodes: who has come, what they say, who is gone."""

from __future__ import annotations

import pathlib
import select
import socket
from dataclasses import asdict, dataclass

from sgpu.agent.nodes import wire
from sgpu.agent.nodes.link import Link, LinkLostError, Visitor
from sgpu.agent.nodes.wire import Message
from sgpu.contract import atomic
from sgpu.contract.clock import Clock
from sgpu.contract.errors import SgpuError
from sgpu.contract.rundir import RunDir

_VERSION = 1
_BACKLOG = 1024


@dataclass(frozen=True, kw_only=True)
class Controller:
    """Where a run's controller listens, as it says in the run folder."""

    host: str
    port: int
    token: str
    version: int = _VERSION

    def write(self, path: pathlib.Path) -> None:
        atomic.write_json(path, asdict(self))


def read_controller(run: RunDir) -> Controller | None:
    """None where there is none yet.

    Raises:
        SgpuError: it was written by another version.
    """
    value = atomic.read_json(run.controller)
    if value is not None and value.get("version") != _VERSION:
        raise SgpuError(f"{run.controller} has version {value.get('version')!r}; this sgpu reads version {_VERSION}")
    return Controller(**value) if value is not None else None


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A node has come."""

    node: int
    address: str


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A node is gone, or silent for too long."""

    node: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Word:
    """A node has said something."""

    node: int
    message: Message


News = Arrival | Departure | Word


class Nodes:
    """Listens from when it is made; `publish` tells the nodes where.

    Order of calls: `publish`, then `look` each turn (it also keeps the heartbeats going); `close`.
    """

    def __init__(self, address: str, count: int, *, clock: Clock, timeout_seconds: float) -> None:
        """`count` nodes besides this one, with the numbers from 1 on."""
        self._listener = socket.create_server((address, 0), backlog=_BACKLOG)
        self._listener.setblocking(False)
        self._token = wire.new_token()
        self.address, self._count = address, count
        self._clock, self._timeout_seconds = clock, timeout_seconds
        self._visitors: list[Visitor] = []
        self._links: dict[int, Link] = {}

    def publish(self, run: RunDir) -> None:
        port = self._listener.getsockname()[1]
        Controller(host=self.address, port=port, token=self._token).write(run.controller)

    def filenos(self) -> list[int]:
        """Each is readable where `look` has something to tell."""
        visitors = [visitor.fileno() for visitor in self._visitors]
        return [self._listener.fileno(), *visitors, *(link.fileno() for link in self._links.values())]

    def present(self, node: int) -> bool:
        return node in self._links

    def send(self, node: int, message: Message) -> None:
        """To a node that is not there: nothing. That it is gone, `look` tells."""
        link = self._links.get(node)
        if link is not None:
            try:
                link.send(message)
            except LinkLostError:
                return  # its connection is as dead for `look`

    def renumber(self, old: int, new: int) -> None:
        """The agent of node `old` is node `new` from now on."""
        self._links[new] = self._links.pop(old)

    def drop(self, node: int, reason: str) -> Departure:
        """Gives a node up: its agent sees the connection close, and ends its workers."""
        self._links.pop(node).close()
        return Departure(node=node, reason=reason)

    def look(self) -> list[News]:
        """What has happened since the last call, of each node in order."""
        self._admit()
        news = self._arrivals()
        for node, link in sorted(self._links.items()):
            try:
                if link.beat_due():
                    link.send({"op": "beat"})
                news += [Word(node=node, message=message) for message in link.receive()]
            except LinkLostError as error:
                news.append(Departure(node=node, reason=str(error)))
                self._links.pop(node).close()
        return news

    def _admit(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            try:
                self._visitors.append(Visitor(connection, self._token, self._clock, self._timeout_seconds))
            except LinkLostError:
                connection.close()

    def _arrivals(self) -> list[News]:
        news: list[News] = []
        waiting, self._visitors = self._visitors, []
        for visitor in waiting:
            try:
                joined = visitor.look()
            except LinkLostError:
                visitor.close()  # it has been told why, if it listens
                continue
            if joined is None:
                self._visitors.append(visitor)
            elif not 0 < joined.node <= self._count:
                visitor.close()
            else:
                former = self._links.pop(joined.node, None)
                if former is not None:  # half-open: the node has come anew before the old connection was given up
                    former.close()
                    news.append(Departure(node=joined.node, reason="another agent has taken its place"))
                self._links[joined.node] = joined.link
                news.append(Arrival(node=joined.node, address=joined.link.peer_address))
        return news

    def close(self) -> None:
        self._listener.close()
        for visitor in self._visitors:
            visitor.close()
        for link in self._links.values():
            link.close()
        self._links.clear()


def poll(descriptors: list[int], seconds: float) -> None:
    """Comes back when one is readable, or after `seconds`."""
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    waiting.poll(max(0.0, seconds) * 1000)
