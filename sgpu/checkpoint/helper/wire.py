"""Messages between a trainer and its helper process: JSON over a local socket, open files beside. Without torch."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from sgpu.contract.errors import CheckpointError

_HEAD = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("3i")
NO_AGENT = "no agent keeps a helper process on each node"
MOST_DESCRIPTORS = 250  # the kernel takes 253 a message


def send(link: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    body = json.dumps(message, separators=(",", ":")).encode()
    socket.send_fds(link, [_HEAD.pack(len(body))], list(descriptors))
    link.sendall(body)


def receive(link: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and the descriptors that came with it (the caller's to close); None where the other side is
    gone, also where it went in the middle of a message.
    """
    head, descriptors = b"", []
    try:
        while len(head) < _HEAD.size:
            part, found, _, _ = socket.recv_fds(link, _HEAD.size - len(head), MOST_DESCRIPTORS)
            descriptors += found
            if not part:
                raise ConnectionResetError
            head += part
        body = _exactly(link, _HEAD.unpack(head)[0])
    except ConnectionError:
        for descriptor in descriptors:
            os.close(descriptor)
        return None
    message: dict[str, Any] = json.loads(body)
    return message, descriptors


def _exactly(link: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    view, done = memoryview(content), 0
    while done < size:
        count = link.recv_into(view[done:])
        if count == 0:
            raise ConnectionResetError
        done += count
    return bytes(content)


def address(name: str) -> str:
    """The abstract socket of that name: it has no file, so nothing is left of it."""
    return f"\0{name}"


def require_same_user(link: socket.socket) -> None:
    """Abstract sockets know no permissions: whoever is on the other side must be this user.

    Raises:
        CheckpointError: it is another.
    """
    told = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(told)
    if user != os.getuid():
        raise CheckpointError(f"a process of user {user} is on the checkpoint helper's socket; expected {os.getuid()}")
