"""Who may speak with a node's helper, and what it makes of requests that make no sense."""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from sgpu.checkpoint.helper.guests import Guests
from sgpu.checkpoint.helper.peers import Node, Peers, connect
from sgpu.checkpoint.writing.job import Layout, SaveJob


@pytest.fixture
def sides(tmp_path: pathlib.Path) -> Iterator[list[Peers]]:
    found = [
        Peers(
            Node(number=number, count=3, address=f"127.0.0.{number + 2}", folder=tmp_path / "peers"),
            Guests(1, lambda: 2**40), lambda url: [],
        ) for number in range(3)
    ]  # fmt: skip
    for side in found:
        side.open()
    yield found
    for side in found:
        side.close()


def job() -> SaveJob:
    return SaveJob(
        folder="step-00000001", step=1, attempt=0, generation=0, rank=0, world_size=3,
        layout=Layout(id="1", view="1", rows=()), objects={}, rank_bytes=150,
    )  # fmt: skip


def heard(sides: list[Peers]) -> bool:
    """Whether node 1 still serves those of its run."""
    link = connect(sides[0].node, 1)
    answer = link.ask({"op": "get", "url": "file:///root", "folder": "step-00000001", "rank": 0})
    link.close()
    return "missing" in answer


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", b"sgpc" + b"\xff" * 8, b"sgpc\x02\0\0\0\x02\0\0\0{}",
             b"sgpc\x01\0\0\0\x00\x00\x00\xff", b"sgpc\x01\0\0\0\x02\0\0\0[]", b"sgpc\x01\0\0\0\x01\0\0\0{",
             b'sgpc\x01\0\0\0\x0a\0\0\0{"node":0}', b""],
    ids=["http", "noise", "version", "too long", "no object", "no JSON", "no proof", "nothing"],
)  # fmt: skip
def test_strangers_are_sent_away(said: bytes, sides: list[Peers]) -> None:
    where = json.loads(sides[0].node.endpoint(1).read_text())
    answer = b""
    with (
        socket.create_connection((where["address"], where["port"]), 10) as stranger,
        contextlib.suppress(OSError),  # sent away
    ):
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        while part := stranger.recv(65536):
            answer += part
    assert b'"proof"' not in answer
    assert heard(sides)


def test_it_listens_on_its_own_address_only(sides: list[Peers]) -> None:
    where = json.loads(sides[0].node.endpoint(1).read_text())
    assert where["address"] == "127.0.0.3"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", where["port"]), 10)


def test_only_the_node_before_brings_images(sides: list[Peers]) -> None:
    one = job()
    link = connect(sides[2].node, 1)
    answer = link.ask({"op": "put", "url": "file:///root", "job": one.to_json(), "bytes": one.size_bytes})
    assert answer == {"refused": "node 1 keeps images of node 0, not of node 2"}
    link.close()


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"bytes": 5}, "does not fit its own description"), ({"job": {}}, "layout"), ({"op": "del"}, "unknown request"),
        ({"job": None}, "NoneType"),
    ],
)  # fmt: skip
def test_a_request_that_makes_no_sense_is_refused(change: dict[str, Any], refusal: str, sides: list[Peers]) -> None:
    one = job()
    link = connect(sides[0].node, 1)
    message = {"op": "put", "url": "file:///root", "job": one.to_json(), "bytes": one.size_bytes}
    assert refusal in link.ask({**message, **change})["refused"]
    link.close()
