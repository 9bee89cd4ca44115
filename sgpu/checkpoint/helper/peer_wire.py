"""What helper processes of different nodes say to each other: JSON and raw bytes over TCP. Without torch.

A message is a head (magic, version, length) and one JSON object; raw bytes follow where a message announces them. The
greeting proves to both sides that the other knows the server's token, which itself is never sent; it says nothing
else before. After it:

    client   put   url, job, bytes            -> {"go": true} or {"refused": why}
             bytes, then {"written": sums}    -> {"stored": true} or {"refused": why}
    client   get   url, folder, rank          -> {"job", "written", "bytes"} and the bytes, or {"missing": why}

Bytes are checksummed, not encrypted: like the gradients beside them, they need a network that is the cluster's own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from typing import Any

from sgpu.contract.errors import CheckpointError

VERSION = 1
MOST_JSON_BYTES = 256 * 2**20
MOST_GREETING_BYTES = 4096
PIECE_BYTES = 2**20
GREETING_SECONDS = 10.0
STALL_SECONDS = 10.0  # a side that does not take a piece, or gives nothing, for so long is given up
_HEAD = struct.Struct("<4sII")
_MAGIC = b"sgpc"

Message = dict[str, Any]


class PeerError(CheckpointError):
    """The helper of another node is gone, silent, or says what none of this run would."""


class PeerLink:
    """A connection to the helper of another node, greeted. Every call raises PeerError where the other side is gone."""

    def __init__(self, connection: socket.socket, *, node: int) -> None:
        self.node = node
        self._connection = connection
        connection.settimeout(STALL_SECONDS)

    def send(self, message: Message) -> None:
        _send(self._connection, message)

    def receive(self) -> Message:
        return _receive(self._connection, MOST_JSON_BYTES)

    def ask(self, message: Message) -> Message:
        self.send(message)
        return self.receive()

    def send_bytes(self, content: memoryview) -> None:
        try:
            self._connection.sendall(content)
        except OSError as error:
            raise _broken(error, self._connection) from error

    def receive_bytes(self, target: memoryview) -> int:
        """Fills a part of `target`, from its start; how much."""
        try:
            count = self._connection.recv_into(target)
        except OSError as error:
            raise _broken(error, self._connection) from error
        if count == 0:
            raise PeerError("it closed the connection before all was sent")
        return count

    def close(self) -> None:
        self._connection.close()


def greet(connection: socket.socket, token: str, *, node: int, to: int) -> PeerLink:
    """A client's side.

    Raises:
        PeerError: the other side is not the helper of node `to`, or does not know the token.
    """
    connection.settimeout(GREETING_SECONDS)
    greeting = _receive(connection, MOST_GREETING_BYTES)
    theirs, ours = str(greeting.get("nonce")), secrets.token_hex(16)
    _send(connection, {"nonce": ours, "node": node, "proof": _proof(token, "client", theirs, ours, node, to)})
    answer = _receive(connection, MOST_GREETING_BYTES)
    if not _same(answer.get("proof"), _proof(token, "server", theirs, ours, node, to)):
        raise PeerError(f"node {to} refused: {answer.get('refused') or 'it does not know its own token'}")
    return PeerLink(connection, node=to)


def welcome(connection: socket.socket, token: str, *, node: int, nodes: int) -> PeerLink:
    """A server's side.

    Raises:
        PeerError: the other side is not of this run; it has been told why.
    """
    connection.settimeout(GREETING_SECONDS)
    ours = secrets.token_hex(16)
    _send(connection, {"nonce": ours})
    answer = _receive(connection, MOST_GREETING_BYTES)
    asking, theirs = answer.get("node"), str(answer.get("nonce"))
    if (
        not isinstance(asking, int)
        or not 0 <= asking < nodes
        or not _same(answer.get("proof"), _proof(token, "client", ours, theirs, asking, node))
    ):
        why = "wrong token, or no node of this run"
        _send(connection, {"refused": why})
        raise PeerError(why)
    _send(connection, {"proof": _proof(token, "server", ours, theirs, asking, node)})
    return PeerLink(connection, node=asking)


def new_token() -> str:
    return secrets.token_hex(32)


def _proof(token: str, side: str, server_nonce: str, client_nonce: str, client: int, server: int) -> str:
    text = f"{side}/{VERSION}/{server_nonce}/{client_nonce}/{client}/{server}"
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def _same(one: object, other: str) -> bool:
    """Compares in constant time."""
    return isinstance(one, str) and hmac.compare_digest(one.encode(), other.encode())


def _send(connection: socket.socket, message: Message) -> None:
    body = json.dumps(message, separators=(",", ":")).encode()
    try:
        connection.sendall(_HEAD.pack(_MAGIC, VERSION, len(body)) + body)
    except OSError as error:
        raise _broken(error, connection) from error


def _receive(connection: socket.socket, most_bytes: int) -> Message:
    magic, version, size = _HEAD.unpack(_exactly(connection, _HEAD.size))
    if magic != _MAGIC or version != VERSION:
        raise PeerError(
            f"it speaks {bytes(magic)!r} version {version}; expected {_MAGIC!r} version {VERSION}. Install the same "
            "sgpu on all nodes."
        )
    if size > most_bytes:
        raise PeerError(f"it announced a message of {size} bytes; at most {most_bytes} are taken here")
    try:
        message = json.loads(_exactly(connection, size))
    except ValueError as error:
        raise PeerError(f"its message is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise PeerError(f"its message is no JSON object but {type(message).__name__}")
    return message


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    try:
        while len(content) < size:
            part = connection.recv(min(size - len(content), PIECE_BYTES))
            if not part:
                raise PeerError("it closed the connection")
            content += part
    except OSError as error:
        raise _broken(error, connection) from error
    return bytes(content)


def _broken(error: OSError, connection: socket.socket) -> PeerError:
    if isinstance(error, TimeoutError):
        return PeerError(f"it took or gave too little within {connection.gettimeout():g} s")
    return PeerError(f"its connection broke ({error.strerror or error})")
