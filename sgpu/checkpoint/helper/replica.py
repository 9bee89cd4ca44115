"""Copies staged images into a neighbour node's memory: one in flight, the newest of each rank, at a bounded rate.

Nobody waits for it: where the next save overtakes a copy, or the neighbour is gone, that copy is given up and counted.
Without torch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sgpu.checkpoint.helper.peer_wire import PIECE_BYTES, PeerError, PeerLink
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.checkpoint.writing.segment import Segment
from sgpu.checkpoint.writing.write import WrittenFile
from sgpu.contract.failpoint import failpoint

LOWEST_PRIORITY = 19
# The writing goes first: a copy waits for it so long, and then has its checksums too.
HEAD_START_SECONDS = 2.0
# A neighbour that does not answer may be starting just now.
PAUSES_SECONDS = (0.25, 1.0)


class UnreachableError(PeerError):
    """There is nobody, or nobody yet."""


class OvertakenError(PeerError):
    """The memory holds another save by now."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A staged image.

    Attributes:
        mark: of the segment, while it holds this image.
        await_writing: waits so many seconds at most until it has been written, or that failed.
        sums: its checksums.
    """

    url: str
    job: SaveJob
    segment: Segment
    mark: int
    await_writing: Callable[[float], object]
    sums: Callable[[], list[WrittenFile]]

    def require_whole(self) -> None:
        if self.segment.mark != self.mark:
            raise OvertakenError("the next save was staged before the copy was complete: save less often")


@dataclass(frozen=True, kw_only=True)
class Copied:
    """How a copy ended. `error`: None, or why the neighbour does not have it."""

    job: SaveJob
    seconds: float
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Copies that were given up, of one rank, since the last time that they were told."""

    count: int = 0
    error: str | None = None


class Copier:
    """Takes offers from many threads; copies in one of its own, started with the first.

    Args:
        connect: to the neighbour; raises UnreachableError or PeerError.
        bytes_per_second: the most that is sent.
        tell: is told of every copy, from the copying thread.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        connect: Callable[[], PeerLink],
        *,
        bytes_per_second: float,
        tell: Callable[[Copied], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect = connect
        self._bytes_per_second = bytes_per_second
        self._tell = tell
        self._clock = clock
        self._news = threading.Condition()
        self._offers: dict[int, Offer] = {}
        self._failures: dict[int, Failures] = {}
        self._thread: threading.Thread | None = None

    def offer(self, offer: Offer) -> None:
        """Returns at once. An earlier offer of the rank's that was not begun is given up."""
        with self._news:
            given_up = self._offers.pop(offer.job.rank, None)
            self._offers[offer.job.rank] = offer
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="sgpu-copier")
                self._thread.start()
            self._news.notify_all()
        if given_up is not None:
            self._note(Copied(job=given_up.job, seconds=0.0, error="it was not begun before the next save"))

    def failures(self, rank: int) -> Failures:
        """What was given up since the last call."""
        with self._news:
            return self._failures.pop(rank, Failures())

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._offers)
                    offer = self._offers.pop(next(iter(self._offers)))
                self._note(self._tried(offer))
        finally:
            with self._news:
                self._thread = None  # whatever ended this one: the next offer has another

    def _tried(self, offer: Offer) -> Copied:
        started, error = self._clock(), None
        try:
            self._copy(offer)
        except (PeerError, OSError, ValueError, KeyError, TypeError) as problem:
            error = (
                str(problem) if isinstance(problem, (PeerError, OSError)) else f"{type(problem).__name__}: {problem}"
            )
        return Copied(job=offer.job, seconds=self._clock() - started, error=error)

    def _note(self, copied: Copied) -> None:
        if copied.error is not None:
            with self._news:
                known = self._failures.get(copied.job.rank, Failures())
                self._failures[copied.job.rank] = Failures(count=known.count + 1, error=copied.error)
        self._tell(copied)

    def _copy(self, offer: Offer) -> None:
        offer.await_writing(HEAD_START_SECONDS)
        offer.require_whole()
        link = self._reach(offer)
        try:
            job = offer.job
            _require(link.ask({"op": "put", "url": offer.url, "job": job.to_json(), "bytes": job.size_bytes}), "go")
            self._send(link, offer)
            sums = offer.sums()
            offer.require_whole()
            answer = link.ask({"written": [file.to_json() for file in sums]})
            offer.require_whole()  # a piece may have changed between its sending and its sum
            _require(answer, "stored")
        finally:
            link.close()

    def _reach(self, offer: Offer) -> PeerLink:
        for pause in PAUSES_SECONDS:
            try:
                return self._connect()
            except UnreachableError:
                with self._news:
                    self._news.wait_for(lambda: offer.job.rank in self._offers, pause)
                offer.require_whole()
        return self._connect()

    def _send(self, link: PeerLink, offer: Offer) -> None:
        memory, size, sent = offer.segment.view(), offer.job.size_bytes, 0
        started, half = self._clock(), False
        while sent < size:
            offer.require_whole()
            piece = memory[sent : min(size, sent + PIECE_BYTES)]
            link.send_bytes(piece)
            sent += piece.nbytes
            if not half and 2 * sent >= size:
                half = True
                failpoint("checkpoint.copy_half", offer.job.rank)
            ahead = sent / self._bytes_per_second - (self._clock() - started)
            if ahead > 0 and sent < size:
                with self._news:
                    self._news.wait(ahead)


def _require(answer: dict[str, object], word: str) -> None:
    if not answer.get(word):
        raise PeerError(f"the neighbour refused: {answer.get('refused')}")
