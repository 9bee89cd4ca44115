"""The writing process. Loads no torch.

    python -m sgpu.checkpoint.helper --link FD              a trainer's own: serves it over an open socket
    python -m sgpu.checkpoint.helper --name NAME --first-rank 8 --ranks 8   an agent's: serves the trainers of a node
                                     [--node 1 --nodes 4 --address 10.0.0.2 --peers FOLDER]   and knows other nodes

A trainer's own ends with its trainer, an agent's when its standard input does; both finish first what is in hand.
Messages (see wire.py), each answered once unless it says otherwise:

    open      rank, url, generation, peers whether a former trainer's memory comes with the answer; with peers, also
                                           `node`, this one's number, or why it is `alone`
    memory                                 a segment comes with it; no answer
    save      job, mark, patience_seconds  when the checkpoint was whole (monotonic seconds), or the error
    patience  seconds                      for the save under way; no answer
    settle                                 nothing is being written from the memory any more
    held                                   complete images that this node has, with their memory
    fetch     folder, wanted               images from other nodes, with their memory: (rank, nodes that have it) each
    release                                no answer: what was fetched is not needed any more
    end                                    no answer: the trainer goes, whoever else holds its socket
    ping                                   nothing; from the agent, which wants to know whether anybody is there
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import socket
import sys
import threading
from typing import Any

from sgpu import settings
from sgpu.checkpoint.helper import wire
from sgpu.checkpoint.helper.copies import Copies
from sgpu.checkpoint.helper.desk import Desk, Shelf, Trainer, failure_to_json
from sgpu.checkpoint.helper.guests import Loan
from sgpu.checkpoint.helper.peers import Node
from sgpu.checkpoint.stores.opening import open_store
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing.job import Layout, SaveJob
from sgpu.checkpoint.writing.segment import Segment
from sgpu.contract import failpoint
from sgpu.contract.errors import CheckpointError, CheckpointSaveError
from sgpu.contract.events import emit
from sgpu.contract.rundir import RunDir

NICENESS = 10
# Saves whose trainer is gone wait so long for ranks that nothing is known of.
ORPHAN_SECONDS = 10.0


class Connection:
    """One trainer's side of the conversation, on a thread of its own; its saves run on another."""

    def __init__(self, desk: Desk, link: socket.socket, copies: Copies | None = None) -> None:
        self._desk = desk
        self._link = link
        self._copies = copies
        self._copying: Copies | None = None
        self._sending = threading.Lock()
        self._trainer: Trainer | None = None
        self._store: Store | None = None
        self._shelf: Shelf | None = None
        self._layout: Layout | None = None
        self._work: threading.Thread | None = None

    def serve(self) -> None:
        while (received := wire.receive(self._link)) is not None:
            message, descriptors = received
            if message["op"] == "end":
                break
            self._obey(message, descriptors)
        if self._trainer is not None:
            self._desk.leave(self._trainer, ORPHAN_SECONDS)
        self._release()
        if self._work is not None:
            self._work.join()
        self._link.close()

    def _answer(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        try:
            with self._sending:
                wire.send(self._link, message, descriptors or [])
        except OSError:
            return  # the trainer is gone; what it asked for was done all the same

    def _obey(self, message: dict[str, Any], descriptors: list[int]) -> None:
        operation = message["op"]
        if operation == "ping":
            self._answer({})
            return
        if operation == "open":
            self._open(message)
            return
        assert self._trainer is not None  # "open" comes first
        assert self._store is not None
        if operation == "memory":
            (descriptor,) = descriptors
            segment = Segment(descriptor, writable=False)
            self._shelf = self._desk.put((self._store.url, self._trainer.rank), segment, self._trainer)
        elif operation == "patience":
            self._trainer.patience_seconds = message["seconds"]
        elif operation == "held":
            loans = self._desk.images(self._store.url)
            if self._copying is not None:
                loans += self._copying.guests(self._store.url)
            self._lend(loans)
        elif operation == "fetch":
            self._fetch(message)
        elif operation == "release":
            self._release()
        elif operation == "settle":
            self._desk.wait_until(lambda: self._shelf is None or not self._shelf.running)
            self._answer({})
        elif operation == "save":
            self._trainer.patience_seconds = message["patience_seconds"]
            self._work = threading.Thread(target=self._save, args=(message, self._trainer, self._store))
            self._work.start()

    def _open(self, message: dict[str, Any]) -> None:
        self._trainer = Trainer(rank=message["rank"], generation=message["generation"])
        try:
            self._store = open_store(message["url"])
        except CheckpointError as error:
            self._answer({"error": str(error)})
            return
        self._desk.arrive(self._trainer, ORPHAN_SECONDS)
        self._shelf = self._desk.take((self._store.url, self._trainer.rank), self._trainer)
        told = self._open_copies(self._trainer.generation) if message["peers"] else {}
        self._answer(told, [] if self._shelf is None else [self._shelf.segment.descriptor])

    def _open_copies(self, generation: int) -> dict[str, Any]:
        if self._copies is None:
            return {"alone": wire.NO_AGENT}
        alone = self._copies.open(generation)
        if alone is None:
            self._copying = self._copies
        return {"alone": alone, "node": self._copies.node.number}

    def _lend(self, loans: list[Loan]) -> None:
        told = [{"job": loan.job.to_json(), "written": [f.to_json() for f in loan.written]} for loan in loans]
        self._answer({"images": told}, [loan.segment.descriptor for loan in loans])
        for loan in loans:
            loan.segment.close()

    def _fetch(self, message: dict[str, Any]) -> None:
        assert self._store is not None  # "open" comes first
        assert self._copying is not None  # who has no peers was told so
        keys = {(self._store.url, message["folder"], rank): nodes for rank, nodes in message["wanted"]}
        try:
            loans = self._copying.peers.fetch_all(keys)
        except CheckpointError as error:
            self._answer({"error": str(error)})
        else:
            self._lend(loans)

    def _release(self) -> None:
        if self._copying is not None and self._store is not None:
            self._copying.peers.release(self._store.url)

    def _save(self, message: dict[str, Any], trainer: Trainer, store: Store) -> None:
        _arm(message["failpoints"])
        try:
            job = SaveJob.from_json(message["job"], self._layout)
            self._layout = job.layout
            assert self._shelf is not None  # "memory" comes before the first save
            shelf, mark = self._shelf, message["mark"]
            finished = self._desk.run(
                shelf, store, job, mark, trainer, lambda: self._offer(shelf, store.url, job, mark)
            )  # fmt: skip
            if not trainer.alive and job.rank == 0:
                _tell_committed(job, store, finished)
            self._answer({"finished": finished, **self._failures(job.rank)})
        except CheckpointSaveError as error:
            self._answer(failure_to_json(error))
        except BaseException as error:  # noqa: BLE001 - this thread's end: the trainer waits for word of it
            self._answer({"error": f"{type(error).__name__}: {error}", "facts": {"rank": trainer.rank}})
            sys.excepthook(*sys.exc_info())

    def _offer(self, shelf: Shelf, url: str, job: SaveJob, mark: int) -> None:
        if self._copying is not None:
            self._copying.offer(self._desk, shelf, url, job, mark)

    def _failures(self, rank: int) -> dict[str, Any]:
        if self._copying is None:
            return {}
        failures = self._copying.failures(rank)
        return {"copies_failed": failures.count, "copy_error": failures.error}


def _arm(failpoints: str) -> None:
    """What a test armed in the trainer holds for what is done on its behalf."""
    if failpoints != settings.failpoints():
        settings.adopt({"SGPU_FAILPOINT": failpoints})
        failpoint.reset()


def _tell_committed(job: SaveJob, store: Store, finished: float) -> None:
    """The trainer cannot any more."""
    root = settings.run_dir()
    if root is not None:
        emit(
            RunDir(root), "checkpoint_committed", generation=job.generation, rank=0, step=job.step,
            blocked_seconds=job.blocked_seconds, save_seconds=finished - job.since, size_bytes=job.size_bytes,
            path=f"{store.url}/{job.folder}",
        )  # fmt: skip


def _serve_one(descriptor: int) -> None:
    Connection(Desk(None), socket.socket(fileno=descriptor)).serve()


def _serve_node(name: str, ranks: range, node: Node | None) -> None:
    desk = Desk(frozenset(ranks))
    copies = Copies(node, desk, len(ranks)) if node is not None else None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(wire.address(name))
        listener.listen(1024)
        threading.Thread(target=_accept, args=(listener, desk, copies), daemon=True).start()
        print("ready", flush=True)
        sys.stdin.read()  # ends when the agent closes it, or ends itself
    desk.wait_until(desk.idle, 2 * ORPHAN_SECONDS)
    os._exit(0)  # trainers that are still connected are not waited for


def _accept(listener: socket.socket, desk: Desk, copies: Copies | None) -> None:
    while True:
        try:
            link, _ = listener.accept()
        except OSError:
            return  # closed: the agent wants an end
        try:
            wire.require_same_user(link)
        except CheckpointError:
            link.close()
            continue
        threading.Thread(target=Connection(desk, link, copies).serve, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", type=int)
    parser.add_argument("--name")
    parser.add_argument("--first-rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--peers", type=pathlib.Path, help="private folder of the run, the same on all nodes")
    asked = parser.parse_args()
    os.nice(NICENESS)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # to the whole run, from a scheduler: what is in hand is finished
        signal.signal(number, signal.SIG_IGN)
    if asked.link is not None:
        _serve_one(asked.link)
    else:
        node = None
        if asked.peers is not None:
            node = Node(number=asked.node, count=asked.nodes, address=asked.address, folder=asked.peers)
        _serve_node(asked.name, range(asked.first_rank, asked.first_rank + asked.ranks), node)


if __name__ == "__main__":
    main()
