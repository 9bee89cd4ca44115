"""Whether a node's helper process does anything at all. Without torch."""

from __future__ import annotations

import socket

from sgpu.checkpoint.helper import wire


def answers(name: str, seconds: float) -> bool:
    """False where it takes a question and says nothing for so long: it is stopped, or stuck.

    One that does not listen yet, or any more, or has just ended, is not meant: that shows otherwise.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(seconds)
        try:
            link.connect(wire.address(name))
            wire.send(link, {"op": "ping"})
            wire.receive(link)
        except (TimeoutError, BlockingIOError):  # the latter: its queue is full
            return False
        except OSError:
            return True
    return True
