"""Hands staged saves to a helper process, so that the trainer's Python does not finish them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sgpu
from sgpu import settings
from sgpu.checkpoint.format import names
from sgpu.checkpoint.helper import wire
from sgpu.checkpoint.helper.replica import Failures
from sgpu.checkpoint.helper.writers import Image, LeftError
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.checkpoint.writing.segment import Segment
from sgpu.checkpoint.writing.write import WrittenFile
from sgpu.contract.errors import CheckpointError, CheckpointSaveError

END_SECONDS = 60.0
RECONNECT_SECONDS = 2.0
FETCHED_AT_ONCE = 100  # open files that come with one answer


class HelperWriter:
    """Hands jobs to the agent's helper process, or to one of its own, started with the first job. One that died is
    replaced for the next.
    """

    def __init__(
        self, store: Store, rank: int, generation: int, patience_seconds: float, *, peers: bool = False
    ) -> None:
        self._store = store
        self._peers = peers
        self.node: int | None = None
        self.alone: str | None = wire.NO_AGENT if peers else None
        self._not_copied = Failures()
        self._rank = rank
        self._generation = generation
        self._patience_seconds = patience_seconds
        self._sending = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._known_layout = ""
        self._left = False
        name = settings.checkpoint_helper()
        found = self._open(_connect(name)) if name is not None else None
        self.segment = Segment(found)
        self.outlives = self._connected()
        if self.outlives and found is None:
            self._send({"op": "memory"}, [self.segment.descriptor])

    def _open(self, link: socket.socket | None) -> int | None:
        """Introduces this trainer; gives the memory that a former one left."""
        if link is None:
            return None
        self._link, self._known_layout = link, ""
        self._send({
            "op": "open", "rank": self._rank, "url": self._store.url, "generation": self._generation,
            "peers": self._peers,
        })  # fmt: skip
        received = wire.receive(link)
        if received is None or "error" in received[0]:
            self._drop()
            return None
        if self._peers:
            self.alone = received[0]["alone"]
            self.node = received[0]["node"] if self.alone is None else None
        return received[1][0] if received[1] else None

    def _connected(self) -> bool:
        return self._link is not None

    def _send(self, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
        assert self._link is not None  # callers have opened it
        with self._sending:
            wire.send(self._link, message, descriptors or [])

    def _ask(self, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]] | None:
        try:
            self._send(message)
        except OSError:
            return None
        assert self._link is not None  # the message was sent over it
        return wire.receive(self._link)

    def save(self, job: SaveJob, mark: int, on_handed: Callable[[], None]) -> float:
        if self._link is None:
            self._reopen()
        message = {
            "op": "save", "mark": mark, "patience_seconds": self._patience_seconds, "failpoints": settings.failpoints(),
            "job": job.to_json(with_layout=job.layout.id != self._known_layout),
        }  # fmt: skip
        try:
            self._send(message)
        except OSError:
            raise self._died() from None
        on_handed()
        assert self._link is not None  # the message was sent over it
        received = wire.receive(self._link)
        if received is None and self._left:
            raise LeftError(f"{job.folder} is finished by the node's helper")
        if received is None:
            error = self._died()
            if self._is_committed(job):
                return time.monotonic()
            raise error
        answer, self._known_layout = received[0], job.layout.id
        if "error" in answer:
            raise CheckpointSaveError(answer["error"], **answer["facts"])
        if "copies_failed" in answer:
            known = self._not_copied
            self._not_copied = Failures(
                count=known.count + answer["copies_failed"], error=answer["copy_error"] or known.error
            )  # fmt: skip
        return float(answer["finished"])

    def _is_committed(self, job: SaveJob) -> bool:
        """Whether all was done that a helper which is gone had to do."""
        try:
            return self._store.size(f"{job.folder}/{names.METADATA}") is not None
        except OSError:
            return False

    def _reopen(self) -> None:
        name = settings.checkpoint_helper()
        link = _connect(name, RECONNECT_SECONDS) if name is not None else None
        self.outlives = link is not None
        left = self._open(link if link is not None else self._start())
        if left is not None:
            os.close(left)  # this trainer has its memory already
        if not self._connected():
            raise self._died()
        self._send({"op": "memory"}, [self.segment.descriptor])

    def _start(self) -> socket.socket:
        package_parent = str(pathlib.Path(sgpu.__file__).parent.parent)
        environment = settings.inherited()
        known = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{package_parent}:{known}" if known else package_parent
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgpu.checkpoint.helper", "--link", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, env=environment, pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt of the notebook must not tear a write
            )  # fmt: skip
        return ours

    def _died(self) -> CheckpointSaveError:
        process = self._process
        self._drop()
        how = "was lost"
        if process is not None:
            code = process.wait(END_SECONDS)
            how = f"ended with {f'signal {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}"
        return CheckpointSaveError(
            f"the checkpoint writer of rank {self._rank} {how} before its share was written. "
            "The next save starts a new one.",
            rank=self._rank,
        )

    def _drop(self) -> None:
        link, self._link, self._process = self._link, None, None
        if link is not None:
            link.close()

    def hurry(self, seconds: float) -> None:
        self._patience_seconds = min(seconds, self._patience_seconds)
        try:
            if self._link is not None:
                self._send({"op": "patience", "seconds": self._patience_seconds})
        except OSError:
            return  # it is gone, and the save under way fails by that

    def settle(self) -> None:
        if self._link is not None and self._ask({"op": "settle"}) is None:
            self._drop()

    def held(self) -> list[Image]:
        if self._link is None:
            return []
        received = self._ask({"op": "held"})
        if received is None:
            self._drop()
            return []
        return _images(*received)

    def fetch(self, folder: str, wanted: Mapping[int, Sequence[int]]) -> list[Image]:
        found: list[Image] = []
        left = list(wanted.items())
        while left:
            now, left = left[:FETCHED_AT_ONCE], left[FETCHED_AT_ONCE:]
            received = self._ask({"op": "fetch", "folder": folder, "wanted": now}) if self._link is not None else None
            if received is None or "error" in received[0]:
                for image in found:
                    image.segment.close()
                raise CheckpointError(received[0]["error"] if received is not None else "the node's helper is gone")
            found += _images(*received)
        return found

    def release(self) -> None:
        with contextlib.suppress(OSError):  # a helper that is gone has released it
            if self._link is not None:
                self._send({"op": "release"})

    def not_copied(self) -> Failures:
        found, self._not_copied = self._not_copied, Failures()
        return found

    def leave(self) -> None:
        self._left = True
        self._say_end()
        if self._link is not None:
            with contextlib.suppress(OSError):  # a `save` that waits for its answer must hear of it
                self._link.shutdown(socket.SHUT_RDWR)
        self.segment.close()

    def _say_end(self) -> None:
        """Closing alone does not end it: processes forked since (a loader's workers) hold the socket too."""
        with contextlib.suppress(OSError):  # it is gone already
            if self._link is not None:
                self._send({"op": "end"})

    def close(self) -> None:
        process = self._process
        self._say_end()
        self._drop()
        self.segment.close()
        if process is None:
            return
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _images(message: dict[str, Any], descriptors: list[int]) -> list[Image]:
    return [
        Image(
            job=SaveJob.from_json(told["job"]), written=tuple(map(WrittenFile.from_json, told["written"])),
            segment=Segment(descriptor),
        )
        for told, descriptor in zip(message["images"], descriptors, strict=True)
    ]  # fmt: skip


def _connect(name: str, patience_seconds: float = 0.0) -> socket.socket | None:
    """The helper of that name; None where it does not answer in time (its agent may be starting another)."""
    deadline = time.monotonic() + patience_seconds
    while True:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            link.connect(wire.address(name))
            wire.require_same_user(link)
            return link
        except (ConnectionError, CheckpointError):
            link.close()
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
