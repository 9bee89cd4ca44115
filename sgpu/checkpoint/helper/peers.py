"""This node's helper among those of the run: where the others are, what they may bring here and take. Without torch.

Each helper listens on its node's own address and leaves `<node>.json` (address, port, a token of its own) in a private
folder of the run. Node n copies to node n + 1, the last one to the first.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sgpu.checkpoint.helper import peer_wire
from sgpu.checkpoint.helper.guests import Guests, Incoming, Loan, free_memory_bytes, look_at, require_room
from sgpu.checkpoint.helper.peer_wire import PIECE_BYTES, Message, PeerError, PeerLink
from sgpu.checkpoint.helper.replica import LOWEST_PRIORITY, UnreachableError
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.checkpoint.writing.segment import Segment
from sgpu.checkpoint.writing.write import WrittenFile
from sgpu.contract import atomic
from sgpu.contract.failpoint import failpoint

CONNECT_SECONDS = 5.0
RECEIVED_BYTES = 4 * PIECE_BYTES
_MOST_CONNECTIONS = 64
_FETCHES = 4
_MOST_INCOMING = 2  # one, and one of a sender that is gone and has not been noticed yet
_BAD_MESSAGE = (KeyError, TypeError, ValueError)

Key = tuple[str, str, int]
"""Root, folder and rank of an image."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """Where a helper stands: node `number` of `count`; `folder` is the same for all of the run."""

    number: int
    count: int
    address: str
    folder: pathlib.Path

    @property
    def neighbour(self) -> int | None:
        """That keeps what is staged here; None where there is none."""
        return (self.number + 1) % self.count if self.count > 1 else None

    @property
    def before(self) -> int:
        """Whose neighbour this is."""
        return (self.number - 1) % self.count

    def endpoint(self, node: int) -> pathlib.Path:
        return self.folder / f"{node}.json"


def connect(here: Node, to: int) -> PeerLink:
    """Reaches another node's helper.

    Raises:
        UnreachableError: it is not there, or not yet.
        PeerError: whoever is there is not it.
    """
    told = atomic.read_json(here.endpoint(to))
    if told is None:
        raise UnreachableError(f"the checkpoint helper of node {to} has not come: {here.endpoint(to)} is not there")
    host, port = str(told["address"]), int(told["port"])
    try:
        connection = socket.create_connection((host, port), CONNECT_SECONDS, (here.address, 0))
    except OSError as error:
        raise UnreachableError(
            f"the checkpoint helper of node {to} does not answer at {host}:{port} ({error})"
        ) from error
    try:
        return peer_wire.greet(connection, str(told["token"]), node=here.number, to=to)
    except PeerError:
        connection.close()
        raise


class Peers:
    """Serves other helpers, and fetches from them. Order of calls: `open` (may be repeated) before all else; `close`.

    Args:
        node: where this one stands.
        guests: images that are kept here for the node before.
        own: complete images of a root that were staged on this node.
    """

    def __init__(self, node: Node, guests: Guests, own: Callable[[str], list[Loan]]) -> None:
        self.node = node
        self.guests = guests
        self._own = own
        self._token = peer_wire.new_token()
        self._news = threading.Condition()
        self._listener: socket.socket | None = None
        self._fetching: set[Key] = set()
        self._fetched: dict[Key, Loan] = {}
        self._connections = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._incoming = threading.BoundedSemaphore(_MOST_INCOMING)

    def open(self) -> None:
        """Listens from now on, on the node's own address.

        Raises:
            OSError: it is not this machine's.
        """
        with self._news:
            if self._listener is not None:
                return
            self._listener = listener = socket.create_server((self.node.address, 0), backlog=_MOST_CONNECTIONS)
        self.node.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        where = {"address": self.node.address, "port": listener.getsockname()[1], "token": self._token}
        atomic.write_json(self.node.endpoint(self.node.number), where, durable=False)
        threading.Thread(target=self._accept, args=(listener,), daemon=True, name="sgpu-peers").start()

    def close(self) -> None:
        """Nobody new is served; the next one to listen for this node leaves its own word."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def fetch_all(self, wanted: Mapping[Key, Iterable[int]]) -> list[Loan]:
        """Several images at a time; all, or none and a PeerError."""
        with ThreadPoolExecutor(_FETCHES) as pool:
            under_way = [pool.submit(self.fetch, key, nodes) for key, nodes in wanted.items()]
        errors = [error for each in under_way if (error := each.exception()) is not None]
        loans = [each.result() for each in under_way if each.exception() is None]
        if errors:
            for loan in loans:
                loan.segment.close()
            raise errors[0]
        return loans

    def fetch(self, key: Key, nodes: Iterable[int]) -> Loan:
        """An image from the first of these nodes that can give it; fetched once for all who ask, until `release`.

        Raises:
            PeerError: none can; names each with its reason.
        """
        with self._news:
            self._news.wait_for(lambda: key not in self._fetching)
            if key in self._fetched:
                return _copy_of(self._fetched[key])
            self._fetching.add(key)
        found: Loan | None = None
        try:
            found = self._fetch(key, nodes)
            return _copy_of(found)
        finally:
            with self._news:
                self._fetching.discard(key)
                if found is not None:
                    self._fetched[key] = found
                self._news.notify_all()

    def release(self, url: str) -> None:
        """What was fetched of a root is not needed any more."""
        with self._news:
            for key in [key for key in self._fetched if key[0] == url]:
                self._fetched.pop(key).segment.close()

    def _fetch(self, key: Key, nodes: Iterable[int]) -> Loan:
        reasons = []
        for node in nodes:
            try:
                link = connect(self.node, node)
                with contextlib.closing(link):
                    return _receive_image(link, key)
            except (PeerError, OSError, *_BAD_MESSAGE) as error:
                reasons.append(f"node {node}: {error}")
        raise PeerError(f"the image of rank {key[2]} of {key[1]} could not be fetched: {'; '.join(reasons)}")

    # ---- what others ask

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # closed
            if not self._connections.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One connection, one request."""
        try:
            with connection:
                link = peer_wire.welcome(connection, self._token, node=self.node.number, nodes=self.node.count)
                message = link.receive()
                if message.get("op") == "put":
                    self._take(link, message)
                elif message.get("op") == "get":
                    self._give(link, message)
                else:
                    link.send({"refused": f"unknown request {message.get('op')!r}"})
        except (PeerError, OSError, *_BAD_MESSAGE):
            return  # it is told where it can be, and says on its side that this ended
        finally:
            self._connections.release()

    def _take(self, link: PeerLink, message: Message) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        if not self._incoming.acquire(blocking=False):
            link.send({"refused": "other copies are under way"})
            return
        try:
            url = str(message["url"])
            incoming = self.guests.admit(self._expected(link, message))
            self._take_bytes(link, url, incoming)
        except (PeerError, OSError, *_BAD_MESSAGE) as error:
            link.send({"refused": f"{error}"})
        finally:
            self._incoming.release()

    def _expected(self, link: PeerLink, message: Message) -> SaveJob:
        job = SaveJob.from_json(message["job"])
        if link.node != self.node.before:
            raise PeerError(f"node {self.node.number} keeps images of node {self.node.before}, not of node {link.node}")
        sizes = [size for file in job.files for size in file.spans]
        if min(sizes, default=0) < 0 or message["bytes"] != job.size_bytes or not 0 <= job.rank < job.world_size:
            raise PeerError(f"an image of {message['bytes']} bytes of rank {job.rank} does not fit its own description")
        return job

    def _take_bytes(self, link: PeerLink, url: str, incoming: Incoming) -> None:
        whole = False
        try:
            link.send({"go": True})
            while incoming.left:
                incoming.fill(link.receive_bytes, RECEIVED_BYTES)
            failpoint("checkpoint.copy_arrived", incoming.job.rank)
            told = link.receive()["written"]
            written = incoming.check([WrittenFile.from_json(file) for file in told])
            whole = True
        finally:
            if not whole:
                self.guests.drop(incoming)
        self.guests.keep(url, incoming, written)
        link.send({"stored": True})

    def _give(self, link: PeerLink, message: Message) -> None:
        url, folder, rank = str(message["url"]), message["folder"], message["rank"]
        found: Loan | None = None
        for loan in [*self._own(url), *self.guests.lend(url)]:
            if found is None and (loan.job.folder, loan.job.rank) == (folder, rank):
                found = loan
            else:
                loan.segment.close()
        if found is None:
            link.send({"missing": f"it holds no complete image of rank {rank} of {folder}"})
            return
        with contextlib.closing(found.segment):
            told = [file.to_json() for file in found.written]
            link.send({"job": found.job.to_json(), "written": told, "bytes": found.job.size_bytes})
            memory = found.segment.view()
            for start in range(0, found.job.size_bytes, PIECE_BYTES):
                link.send_bytes(memory[start : min(start + PIECE_BYTES, found.job.size_bytes)])


def _copy_of(loan: Loan) -> Loan:
    return Loan(job=loan.job, written=loan.written, segment=look_at(loan.segment))


def _receive_image(link: PeerLink, key: Key) -> Loan:
    url, folder, rank = key
    answer = link.ask({"op": "get", "url": url, "folder": folder, "rank": rank})
    if "job" not in answer:
        raise PeerError(str(answer.get("missing") or answer.get("refused")))
    job = SaveJob.from_json(answer["job"])
    if (job.folder, job.rank, job.size_bytes) != (folder, rank, answer["bytes"]):
        raise PeerError(f"it offers {answer['bytes']} bytes of rank {job.rank} of {job.folder}")
    require_room(job.size_bytes, free_memory_bytes())
    incoming = Incoming(job, Segment())
    while incoming.left:
        incoming.fill(link.receive_bytes, RECEIVED_BYTES)
    written = incoming.check([WrittenFile.from_json(file) for file in answer["written"]])
    return Loan(job=job, written=written, segment=incoming.segment)
