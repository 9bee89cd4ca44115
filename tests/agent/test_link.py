"""Agents talk over real sockets; what is not signed by the right agent, in the right order, is not believed."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from sgpu.agent.nodes import wire
from sgpu.agent.nodes.link import Joined, Lines, Link, LinkLostError, Visitor
from sgpu.agent.nodes.wire import Signer, WireError
from sgpu.testing.clock import FakeClock

_TOKEN = "secret"
_TIMEOUT_SECONDS = 5.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    listener.close()
    yield one, other
    one.close()
    other.close()


def _until(look: Callable[[], object], seconds: float = 10.0) -> object:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline
    return found


def _greet(other: socket.socket, token: str = _TOKEN, **changes: object) -> tuple[str, str]:
    """A node's side of the greeting, by hand; both nonces."""
    lines = Lines(other)
    greeting = wire.parse(bytes(_until(lines.take_one)))  # type: ignore[call-overload]
    theirs, ours = greeting["nonce"], wire.new_nonce()
    proof = wire.proof(token, "node", theirs, ours, 1)
    lines.put(wire.line({"sgpu": wire.VERSION, "nonce": ours, "node": 1, "proof": proof, **changes}))
    return theirs, ours


def _links(pair: tuple[socket.socket, socket.socket], clock: FakeClock) -> tuple[Link, Link]:
    """(the controller's, the node's) after a greeting."""
    visitor = Visitor(pair[0], _TOKEN, clock, _TIMEOUT_SECONDS)
    theirs, ours = _greet(pair[1])
    joined = _until(visitor.look)
    assert isinstance(joined, Joined)
    assert joined.node == 1
    lines = Lines(pair[1])
    answer = wire.parse(bytes(_until(lines.take_one)))  # type: ignore[call-overload]
    assert answer["proof"] == wire.proof(_TOKEN, "controller", theirs, ours, 1)
    node = Link(
        lines, sends=Signer(_TOKEN, "to controller", theirs, ours), checks=Signer(_TOKEN, "to node", theirs, ours),
        clock=clock, timeout_seconds=_TIMEOUT_SECONDS,
    )  # fmt: skip
    return joined.link, node


def test_messages_arrive_in_order_both_ways(pair: tuple[socket.socket, socket.socket]) -> None:
    controller, node = _links(pair, FakeClock())
    for number in range(50):
        controller.send({"op": "stop", "number": number, "text": "é\n" * 200})
        node.send({"op": "stopped", "number": number})
    for link in (controller, node):
        found: list[int] = []
        while len(found) < 50:
            found += [message["number"] for message in link.receive()]
        assert found == list(range(50))


def test_a_large_message_is_sent_bit_by_bit_and_blocks_nobody(pair: tuple[socket.socket, socket.socket]) -> None:
    controller, node = _links(pair, FakeClock())
    controller.send({"op": "start", "environment": {"TEXT": "x" * 6_000_000}})
    found = _until(lambda: [controller.receive(), node.receive()][1])
    assert isinstance(found, list)
    assert len(found[0]["environment"]["TEXT"]) == 6_000_000


@pytest.mark.parametrize("token", ["another", ""])
def test_who_does_not_know_the_token_is_turned_away(pair: tuple[socket.socket, socket.socket], token: str) -> None:
    visitor = Visitor(pair[0], _TOKEN, FakeClock(), _TIMEOUT_SECONDS)
    _greet(pair[1], token)
    with pytest.raises(LinkLostError, match="does not know this run's token"):
        _until(visitor.look)
    assert "token" in wire.parse(bytes(_until(Lines(pair[1]).take_one)))["refused"]  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"sgpu": 2}, "version 2 of the protocol"), ({"sgpu": None}, "install the same sgpu"), ({"node": 2}, "token"),
     ({"node": "1"}, "token"), ({"proof": None}, "token"), ({"nonce": "0" * 32}, "token")],
)  # fmt: skip
def test_a_greeting_that_is_none(
    pair: tuple[socket.socket, socket.socket], changes: dict[str, object], said: str
) -> None:
    visitor = Visitor(pair[0], _TOKEN, FakeClock(), _TIMEOUT_SECONDS)
    _greet(pair[1], **changes)
    with pytest.raises(LinkLostError, match=said):
        _until(visitor.look)


@pytest.mark.parametrize("content", [b"GET / HTTP/1.1\r\n", b"[]\n", b"\x80\x04\x95\n", b"x" * 100_000])
def test_strangers_are_turned_away(pair: tuple[socket.socket, socket.socket], content: bytes) -> None:
    visitor = Visitor(pair[0], _TOKEN, FakeClock(), _TIMEOUT_SECONDS)
    pair[1].sendall(content)
    with pytest.raises(LinkLostError):
        _until(visitor.look)


def test_who_says_nothing_is_not_waited_for(pair: tuple[socket.socket, socket.socket]) -> None:
    clock = FakeClock()
    visitor = Visitor(pair[0], _TOKEN, clock, _TIMEOUT_SECONDS)
    assert visitor.look() is None
    clock.advance(_TIMEOUT_SECONDS + 0.1)
    with pytest.raises(LinkLostError, match="did not say who it is"):
        visitor.look()


def test_a_line_is_believed_once_in_its_order_and_direction() -> None:
    sender, receiver = Signer(_TOKEN, "to node", "n", "m"), Signer(_TOKEN, "to node", "n", "m")
    first, second = sender.sign({"number": 1}), sender.sign({"number": 2})
    assert receiver.check(first) == {"number": 1}
    for wrong in (first, second.replace(b"2", b"3"), b"", b"no signature", b"0" * 32 + b" {}"):
        with pytest.raises(WireError, match="without a valid signature"):
            receiver.check(wrong)
    skips = Signer(_TOKEN, "to node", "n", "m")
    with pytest.raises(WireError):
        skips.check(second)
    for direction, nonce, token in (("to controller", "n", _TOKEN), ("to node", "x", _TOKEN), ("to node", "n", "t")):
        with pytest.raises(WireError):
            Signer(token, direction, nonce, "m").check(first)


def test_a_forged_line_ends_the_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    controller, _ = _links(pair, FakeClock())
    pair[1].sendall(b"0" * 32 + b" " + json.dumps({"op": "exited", "name": "rank0.g0", "status": 0}).encode() + b"\n")
    with pytest.raises(LinkLostError, match="without a valid signature"):
        _until(controller.receive)


def test_silence_is_a_loss_in_both_directions(pair: tuple[socket.socket, socket.socket]) -> None:
    """The connection stays open: a peer that is frozen, or whose packets are dropped, looks like this."""
    clock = FakeClock()
    links = _links(pair, clock)
    clock.advance(_TIMEOUT_SECONDS - 0.1)
    for link in links:
        assert link.receive() == []
    clock.advance(0.2)
    for link in links:
        with pytest.raises(LinkLostError, match=r"was silent for 5\.1 s \(limit 5 s\)"):
            link.receive()


def test_heartbeats_keep_a_connection(pair: tuple[socket.socket, socket.socket]) -> None:
    clock = FakeClock()
    controller, node = _links(pair, clock)
    for _ in range(30):
        clock.advance(_TIMEOUT_SECONDS / 20)
        assert node.beat_due()
        assert not node.beat_due(), "once"
        node.send({"op": "beat"})
        assert _until(controller.receive) == [{"op": "beat"}]


def test_what_came_before_the_end_is_heard(pair: tuple[socket.socket, socket.socket]) -> None:
    controller, node = _links(pair, FakeClock())
    node.send({"op": "stopped", "number": 7})
    node.close()
    assert _until(controller.receive) == [{"op": "stopped", "number": 7}]
    with pytest.raises(LinkLostError, match="was closed"):
        _until(controller.receive)


def test_a_node_that_takes_nothing_is_given_up(pair: tuple[socket.socket, socket.socket]) -> None:
    controller, _ = _links(pair, FakeClock())

    def send_on() -> None:
        for _ in range(100):
            controller.send({"text": "x" * 1_000_000})

    with pytest.raises(LinkLostError, match="takes nothing any more"):
        send_on()
