"""What agents say to each other: one JSON object a line, signed. Pure; link.py carries it.

The greeting proves to both sides that the other knows the run's token, which itself is never sent:

    controller   {"sgpu": 1, "nonce"}
    node         {"sgpu": 1, "nonce", "node", "proof"}
    controller   {"proof"} or {"refused"}

From then on each line is `<signature> <JSON>`. The signature covers the direction and a running number: a line that was
altered, repeated, left out or sent back to its sender is not believed.

    controller -> node   start   name, rank, generation, environment, log, parked (the worker that begins anew, or null)
                         interrupt  names, generation     workers give up their calls, and park
                         signal  name, number
                         examine name, into               a file for what the kernel tells of a worker
                         ask     rank, what, stop_step, seconds (left; 0: no limit)
                         stop    number, seconds, names   end these workers (null: all), and answer with that number
                         reopen                           after `lost`
                         be      node                     a spare takes the place of a node that was lost
                         end                              the run is over
    node -> controller   ready                            workers start at once from here on
                         exited  name, status, out_of_memory      as in workers.Exit
                         lost    message                  the process that workers are forked from ended
                         stopped number
                         asked   reason                   this node was told to go ("preempt")
    both                 beat    from a node with now_ns, ranks (beats by rank) and still (names of stopped workers)
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import asdict, replace
from typing import Any

from sgpu.contract.errors import SgpuError
from sgpu.contract.heartbeat import Beat, Category, Section, WorkerState

VERSION = 1
_SIGNATURE_CHARACTERS = 32

Message = dict[str, Any]


class WireError(SgpuError):
    """What came over a connection is not what an agent of this run says."""


def new_token() -> str:
    """A secret that the agents of one run share."""
    return secrets.token_hex(32)


def new_nonce() -> str:
    return secrets.token_hex(16)


def line(message: Message) -> bytes:
    """An unsigned line, for the greeting."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def parse(raw: bytes) -> Message:
    """An unsigned line.

    Raises:
        WireError: it is no JSON object.
    """
    try:
        message = json.loads(raw)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise WireError(f"expected one JSON object a line; found {raw[:60]!r}")
    return message


def check_version(message: Message) -> None:
    """Raises WireError: the other side speaks another version, or is no agent."""
    if message.get("sgpu") != VERSION:
        raise WireError(
            f"the other agent speaks version {message.get('sgpu')!r} of the protocol, this one version {VERSION}; "
            "install the same sgpu on all nodes"
        )


def proof(token: str, who: str, controller_nonce: str, node_nonce: str, node: int) -> str:
    """Shows that `who` ("node" or "controller") knows the token."""
    text = f"{who}/{VERSION}/{controller_nonce}/{node_nonce}/{node}"
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def same(one: object, other: str) -> bool:
    """Compares secrets in constant time."""
    return isinstance(one, str) and hmac.compare_digest(one.encode(), other.encode())


class Signer:
    """One direction of a connection: the sender's to sign, the receiver's to check, in step with each other."""

    def __init__(self, token: str, direction: str, controller_nonce: str, node_nonce: str) -> None:
        text = f"{direction}/{controller_nonce}/{node_nonce}"
        self._key = hmac.new(token.encode(), text.encode(), hashlib.sha256).digest()
        self._number = 0

    def sign(self, message: Message) -> bytes:
        content = json.dumps(message, separators=(",", ":")).encode()
        return self._signature(content) + b" " + content + b"\n"

    def check(self, raw: bytes) -> Message:
        """The message of a line.

        Raises:
            WireError: its signature is not the one that it should have.
        """
        signature, _, content = raw.rstrip(b"\n").partition(b" ")
        if not hmac.compare_digest(signature, self._signature(content)):
            raise WireError(f"a line without a valid signature came in: {raw[:60]!r}")
        return parse(content)

    def _signature(self, content: bytes) -> bytes:
        self._number += 1
        digest = hmac.new(self._key, b"%d " % self._number + content, hashlib.sha256).hexdigest()
        return digest[:_SIGNATURE_CHARACTERS].encode()


def beat_to_json(beat: Beat) -> Message:
    return asdict(beat)


def beat_from_json(value: Message, *, shift_ns: int) -> Beat:
    """`shift_ns` is what the sender's monotonic clock lacks to ours."""
    beat = Beat(
        **{
            **value,
            "state": WorkerState(value["state"]),
            "section": Section(value["section"]),
            "category": Category(value["category"]),
            "seconds": tuple(value["seconds"]),
        }
    )
    return replace(
        beat, beat_ns=beat.beat_ns + shift_ns, section_since_ns=beat.section_since_ns + shift_ns,
        ledger_since_ns=beat.ledger_since_ns + shift_ns, started_ns=beat.started_ns + shift_ns,
    )  # fmt: skip
