"""The agent of every node but the first: does what the controller says, and ends its workers when there is none."""

from __future__ import annotations

import pathlib
import select
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass

from sgpu.agent.nodes import wire
from sgpu.agent.nodes.connections import read_controller
from sgpu.agent.nodes.link import Link, LinkLostError, join
from sgpu.agent.nodes.wire import Message
from sgpu.agent.notices import Notice
from sgpu.agent.workers import LocalHost, NodeUnfitError, ZygoteLostError, worker_name
from sgpu.contract.clock import Clock
from sgpu.contract.exits import exit_code
from sgpu.contract.heartbeat import Page, Request, WorkerState
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import read_status

_TURN_SECONDS = 0.02
_RETRY_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Place:
    """What comes with being a certain node: the page of its ranks, and what their workers' environment has besides."""

    page: Page
    environment: Mapping[str, str]


class Follower:
    """One node's hands at the other end of a link.

    Args:
        place: None: a spare, which waits to be given one, and is set up for it by `take`.
        asked: whether this node was told to go.
    """

    def __init__(
        self,
        place: Place | None,
        *,
        take: Callable[[int], Place],
        link: Link,
        host: LocalHost,
        clock: Clock,
        asked: Callable[[], Notice | None],
    ) -> None:
        self._place, self._take = place, take
        self._link, self._host, self._clock = link, host, clock
        self._asked = asked
        self._generation = 0
        self._ranks: set[int] = set()
        self._told_states: list[WorkerState] = []
        self._told_ready = self._told_asked = self._lost = self._ended = False

    def serve(self) -> None:
        """Returns when the controller says that the run is over.

        Raises:
            LinkLostError: the controller is gone or silent. Its workers are still to be ended.
        """
        while not self._ended:
            self.turn()
            self._await(_TURN_SECONDS)

    def turn(self) -> None:
        """Does what there is to do now."""
        for message in self._link.receive():
            try:
                self._obey(message)
            except ZygoteLostError as error:
                self._tell_lost(error)
        self._look_at_workers()
        notice = self._asked()
        if notice is not None and not self._told_asked:
            self._told_asked = True
            self._link.send({"op": "asked", **asdict(notice)})
        if self._link.beat_due():
            self._link.send(self._beat())

    def _await(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        if not self._lost:
            poll.register(self._host.fileno(), select.POLLIN)
        poll.poll(seconds * 1000)

    def _obey(self, message: Message) -> None:
        operation = message["op"]
        if operation == "be":
            self._place = self._take(message["node"])
        elif operation == "start" and self._place is not None:
            if message["generation"] != self._generation:
                self._ranks.clear()
            self._generation = message["generation"]
            self._ranks.add(message["rank"])
            # How far the rank has come, and where its time went, is known to the controller: it may have run elsewhere.
            shift_ns = int(self._clock.monotonic() * 1e9) - message["now_ns"]
            self._place.page.slot(message["rank"]).adopt(wire.beat_from_json(message["beat"], shift_ns=shift_ns))
            self._host.start(
                message["name"], rank=message["rank"], generation=message["generation"],
                environment={**message["environment"], **self._place.environment}, log=pathlib.Path(message["log"]),
                parked=message["parked"],
            )  # fmt: skip
        elif operation == "interrupt":
            self._host.interrupt(message["names"], message["generation"])
        elif operation == "signal":
            self._host.signal(message["name"], message["number"])
        elif operation == "examine":
            self._host.examine(message["name"], pathlib.Path(message["into"]))
        elif operation == "ask" and self._place is not None:
            deadline = self._clock.monotonic() + message["seconds"] if message["seconds"] else 0.0
            self._place.page.slot(message["rank"]).request(
                Request(message["what"]), stop_step=message["stop_step"], deadline_ns=int(deadline * 1e9)
            )
        elif operation == "stop":
            if message["names"] is None:
                self._host.stop_all(message["seconds"])
            else:
                self._host.end(message["names"], message["seconds"])
            self._link.send(self._beat())
            self._link.send({"op": "stopped", "number": message["number"]})
        elif operation == "reopen":
            self._host.reopen()
            self._lost = self._told_ready = False
        elif operation == "end":
            self._ended = True

    def _look_at_workers(self) -> None:
        if self._lost:
            return
        try:
            exits, states = self._host.wait(0.0), self._states()
            if exits or states != self._told_states:
                self._told_states = states
                self._link.send(self._beat())  # how far they had come; that they have failed, or are parked
            for ended in exits:
                self._link.send({"op": "exited", **asdict(ended)})
            if not self._told_ready and self._host.ready():
                self._told_ready = True
                self._link.send({"op": "ready"})
        except ZygoteLostError as error:
            self._tell_lost(error)

    def _states(self) -> list[WorkerState]:
        if self._place is None:
            return []
        return [self._place.page.slot(rank).read().state for rank in sorted(self._ranks)]

    def _tell_lost(self, error: ZygoteLostError) -> None:
        self._lost = True
        unfit = isinstance(error, NodeUnfitError)
        self._link.send({"op": "unfit" if unfit else "lost", "message": str(error)})

    def _beat(self) -> Message:
        beats, still = {}, []
        if self._place is not None:
            beats = {str(rank): wire.beat_to_json(self._place.page.slot(rank).read()) for rank in self._ranks}
            names = [worker_name(self._generation, rank) for rank in self._ranks]
            still = [name for name in names if self._host.stopped(name)]
        return {"op": "beat", "now_ns": int(self._clock.monotonic() * 1e9), "ranks": beats, "still": still}


def find_controller(
    run: RunDir, node: int, *, address: str, clock: Clock, timeout_seconds: float, patience_seconds: float
) -> Link | None:
    """Joins the run's controller, for which it waits; None: the run has ended.

    Args:
        address: this node's, to connect from; "": whichever leads there.

    Raises:
        LinkLostError: none was found within `patience_seconds`.
    """
    came = clock.wall()
    deadline = clock.monotonic() + patience_seconds
    reason = f"there is no {run.controller}"
    while clock.monotonic() < deadline:
        status = read_status(run)
        if status is not None and status.final and (status.updated > came or not exit_code(status).goes_on):
            return None  # else it is an earlier life's, and a controller is about to go on with the run
        controller = read_controller(run)
        if controller is not None:
            try:
                return join(
                    controller.host, controller.port, controller.token, node=node, clock=clock,
                    timeout_seconds=timeout_seconds, source=address,
                )  # fmt: skip
            except LinkLostError as error:
                reason = str(error)
        clock.sleep(_RETRY_SECONDS)  # a shared folder tells nobody that a file appeared
    raise LinkLostError(f"node {node} found no controller within {patience_seconds:g} s: {reason}")
