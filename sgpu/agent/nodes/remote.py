"""What the controller knows of another node, and how its ranks' heartbeats and requests cross over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from sgpu.agent.nodes import wire
from sgpu.agent.nodes.wire import Message
from sgpu.contract.heartbeat import Asked, Page, Request
from sgpu.contract.status import NodeStatus

_NOTHING = Asked(what=Request.NONE, stop_step=0, deadline_ns=0)


@dataclass(kw_only=True)
class Remote:
    """One node besides the first.

    Attributes:
        ranks: those that it has in this generation.
        awaited_since: when its agent was (last) started, monotonic.
        missing: it was lost, and is not here again; it may be done without.
        shift_ns: what its monotonic clock lacks to ours.
        stopped: the newest of our `stop` commands that it has carried out.
        lost: the reason, while the process that its workers are forked from is gone.
        still: names of its stopped workers.
        asked: what its ranks were last told.
    """

    node: int
    awaited_since: float
    ranks: range = range(0)
    missing: bool = False
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

    def mirror(self, message: Message, page: Page, now: float) -> None:
        """Takes its beats over into the run's page."""
        shift_ns = int(now * 1e9) - message["now_ns"]
        self.shift_ns = shift_ns if self.shift_ns is None else min(shift_ns, self.shift_ns)  # the least delayed
        self.still = frozenset(message["still"])
        for rank in self.ranks:
            beat = message["ranks"].get(str(rank))
            if beat is not None:
                page.slot(rank).mirror(wire.beat_from_json(beat, shift_ns=self.shift_ns))

    def requests(self, page: Page, now: float) -> Iterator[Message]:
        """What the run's page asks of its ranks, and they have not been told yet."""
        for rank in self.ranks if self.address is not None else ():
            asked = page.slot(rank).requested()
            if asked == self.asked.get(rank, _NOTHING):
                continue
            self.asked[rank] = asked
            left = asked.deadline_ns / 1e9 - now if asked.deadline_ns else 0.0
            yield {
                "op": "ask", "rank": rank, "what": int(asked.what), "stop_step": asked.stop_step, "seconds": left,
            }  # fmt: skip


class Whereabouts:
    """On which node each worker is, of this generation and the one before."""

    def __init__(self) -> None:
        self._nodes: dict[int, dict[str, int]] = {}

    def note(self, name: str, node: int, generation: int) -> None:
        self._nodes.setdefault(generation, {})[name] = node
        for old in self._nodes.keys() - {generation, generation - 1}:
            del self._nodes[old]

    def elsewhere(self, names: Iterable[str]) -> dict[int, list[str]]:
        """Those that are not on the first node, by node."""
        found: dict[int, list[str]] = {}
        for name in names:
            node = next((nodes[name] for nodes in self._nodes.values() if name in nodes), 0)
            if node:
                found.setdefault(node, []).append(name)
        return found
