"""A connection between two agents: never blocks, and tells when the other side is gone or silent."""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass

from sgpu.agent.nodes import wire
from sgpu.agent.nodes.wire import Message, Signer, WireError
from sgpu.contract.clock import Clock
from sgpu.contract.errors import SgpuError

BEATS_A_TIMEOUT = 20  # heartbeats are sent so often within the time after which the other side is given up
_MOST_BEAT_SECONDS = 0.25
_MOST_UNSENT_BYTES = 16 * 2**20
_LONGEST_LINE_BYTES = 8 * 2**20
_LONGEST_GREETING_BYTES = 4096
_CHUNK_BYTES = 65536
_MOST_LINES = 1000  # a turn


class LinkLostError(SgpuError):
    """The other agent's side is closed, silent for too long, or says what no agent of this run would."""


class Lines:
    """A socket that does not block, as lines. Order of calls: `put` and `take` as often as wished; `close`."""

    def __init__(self, connection: socket.socket, *, longest_bytes: int = _LONGEST_LINE_BYTES) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.longest_bytes = connection, longest_bytes
        self._unsent = self._unread = b""
        self._closed = False

    def put(self, content: bytes = b"") -> None:
        """Sends what the connection takes now, and keeps the rest for the next call."""
        self._unsent += content
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > _MOST_UNSENT_BYTES:
                raise LinkLostError("it takes nothing any more") from None
        except OSError as error:
            raise LinkLostError(f"its connection broke ({error.strerror})") from error

    def take(self) -> list[bytes]:
        """All whole lines that have come in.

        Raises:
            LinkLostError: the other side closed, and there are no more lines.
        """
        lines: list[bytes] = []
        try:
            while len(lines) < _MOST_LINES and (one := self.take_one()) is not None:
                lines.append(one)
        except LinkLostError:
            if not lines:
                raise
        return lines

    def take_one(self) -> bytes | None:
        """The next line; None: it has not come yet. Raises as `take`, where no line comes before."""
        if b"\n" not in self._unread and not self._closed:
            self._read()
        first, end, rest = self._unread.partition(b"\n")
        if end:
            self._unread = rest
            return first
        if self._closed:
            raise LinkLostError("its connection was closed")
        if len(self._unread) > self.longest_bytes:
            raise LinkLostError(f"it sent a line of more than {self.longest_bytes} bytes")
        return None

    def _read(self) -> None:
        try:
            while b"\n" not in self._unread and len(self._unread) <= self.longest_bytes:
                chunk = self.connection.recv(_CHUNK_BYTES)
                if not chunk:
                    self._closed = True
                    return
                self._unread += chunk
        except BlockingIOError:
            return
        except OSError as error:
            raise LinkLostError(f"its connection broke ({error.strerror})") from error

    def close(self) -> None:
        self.connection.close()


class Link:
    """Signed messages to and from one agent."""

    def __init__(self, lines: Lines, *, sends: Signer, checks: Signer, clock: Clock, timeout_seconds: float) -> None:
        lines.longest_bytes = _LONGEST_LINE_BYTES
        self._lines, self._sends, self._checks, self._clock = lines, sends, checks, clock
        self._timeout_seconds = timeout_seconds
        self._beat_seconds = min(_MOST_BEAT_SECONDS, timeout_seconds / BEATS_A_TIMEOUT)
        self._heard_at = clock.monotonic()
        self._beat_at = -1.0

    def fileno(self) -> int:
        return self._lines.connection.fileno()

    @property
    def own_address(self) -> str:
        return str(self._lines.connection.getsockname()[0])

    @property
    def peer_address(self) -> str:
        return str(self._lines.connection.getpeername()[0])

    def send(self, message: Message) -> None:
        """Raises LinkLostError."""
        self._lines.put(self._sends.sign(message))

    def beat_due(self) -> bool:
        """Whether it is time for a heartbeat; says so once."""
        now = self._clock.monotonic()
        if now - self._beat_at < self._beat_seconds:
            return False
        self._beat_at = now
        return True

    def receive(self) -> list[Message]:
        """What has come in; sends what had to wait.

        Raises:
            LinkLostError: the other side is gone, or was silent for too long.
        """
        self._lines.put()
        try:
            messages = [self._checks.check(raw) for raw in self._lines.take()]
        except WireError as error:
            raise LinkLostError(str(error)) from error
        now = self._clock.monotonic()
        if messages:
            self._heard_at = now
        elif now - self._heard_at > self._timeout_seconds:
            raise LinkLostError(f"it was silent for {now - self._heard_at:.1f} s (limit {self._timeout_seconds:g} s)")
        return messages

    def close(self) -> None:
        self._lines.close()


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A node that has shown that it belongs to the run."""

    node: int
    link: Link


class Visitor:
    """The controller's side of a greeting: somebody connected, who it is remains to be seen."""

    def __init__(self, connection: socket.socket, token: str, clock: Clock, timeout_seconds: float) -> None:
        self._lines = Lines(connection, longest_bytes=_LONGEST_GREETING_BYTES)
        self._token, self._clock, self._timeout_seconds = token, clock, timeout_seconds
        self._nonce = wire.new_nonce()
        self._since = clock.monotonic()
        self._lines.put(wire.line({"sgpu": wire.VERSION, "nonce": self._nonce}))

    def fileno(self) -> int:
        return self._lines.connection.fileno()

    def look(self) -> Joined | None:
        """The node, once it has shown who it is; None while it has not.

        Raises:
            LinkLostError: it is none of ours, and has been told why.
        """
        told = self._lines.take_one()
        if told is None:
            if self._clock.monotonic() - self._since > self._timeout_seconds:
                raise LinkLostError("it did not say who it is")
            return None
        try:
            answer = wire.parse(told)
            wire.check_version(answer)
            node, nonce = answer.get("node"), str(answer.get("nonce"))
            if not isinstance(node, int) or not wire.same(
                answer.get("proof"), wire.proof(self._token, "node", self._nonce, nonce, node)
            ):
                raise WireError("the other agent does not know this run's token")
        except WireError as error:
            self._lines.put(wire.line({"refused": str(error)}))
            raise LinkLostError(str(error)) from error
        self._lines.put(wire.line({"proof": wire.proof(self._token, "controller", self._nonce, nonce, node)}))
        return Joined(node=node, link=Link(
            self._lines, sends=Signer(self._token, "to node", self._nonce, nonce),
            checks=Signer(self._token, "to controller", self._nonce, nonce), clock=self._clock,
            timeout_seconds=self._timeout_seconds,
        ))  # fmt: skip

    def close(self) -> None:
        self._lines.close()


def join(host: str, port: int, token: str, *, node: int, clock: Clock, timeout_seconds: float, source: str) -> Link:
    """A node's side of the greeting.

    Args:
        source: the address to connect from; "": any.

    Raises:
        LinkLostError: there is no controller, or it is not that of this run.
    """
    try:
        connection = socket.create_connection((host, port), timeout_seconds, (source, 0) if source else None)
    except OSError as error:
        raise LinkLostError(f"there is no controller at {host}:{port} ({error})") from error
    try:
        lines = Lines(connection, longest_bytes=_LONGEST_GREETING_BYTES)
        greeting = _answer(lines, timeout_seconds)
        wire.check_version(greeting)
        theirs, ours = str(greeting.get("nonce")), wire.new_nonce()
        lines.put(wire.line({
            "sgpu": wire.VERSION, "nonce": ours, "node": node, "proof": wire.proof(token, "node", theirs, ours, node)
        }))  # fmt: skip
        answer = _answer(lines, timeout_seconds)
        if not wire.same(answer.get("proof"), wire.proof(token, "controller", theirs, ours, node)):
            raise WireError(f"the controller at {host}:{port} refused this node: {answer.get('refused')}")
    except (WireError, LinkLostError) as error:
        connection.close()
        raise LinkLostError(str(error)) from error
    return Link(
        lines, sends=Signer(token, "to controller", theirs, ours), checks=Signer(token, "to node", theirs, ours),
        clock=clock, timeout_seconds=timeout_seconds,
    )  # fmt: skip


def _answer(lines: Lines, timeout_seconds: float) -> Message:
    deadline = time.monotonic() + timeout_seconds
    while (told := lines.take_one()) is None:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([lines.connection], [], [], left)[0]:
            raise LinkLostError(f"the controller did not answer within {timeout_seconds:g} s")
    return wire.parse(told)
