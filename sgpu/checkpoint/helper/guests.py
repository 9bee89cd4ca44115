"""Images of a neighbour node's ranks, kept in this node's memory: one a rank, the newest. Without torch."""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Callable
from dataclasses import dataclass

from sgpu.checkpoint.format.checksum import SpanChecksums
from sgpu.checkpoint.helper.peer_wire import PeerError
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.checkpoint.writing.segment import Segment
from sgpu.checkpoint.writing.write import WrittenFile, written_of

MOST_OF_FREE_MEMORY = 0.5  # that one image may take


@dataclass(frozen=True, kw_only=True)
class Loan:
    """A complete image to read from; its segment is the borrower's to close."""

    job: SaveJob
    written: list[WrittenFile]
    segment: Segment


@dataclass(kw_only=True)
class _Guest:
    """`lent`: somebody may be reading this memory, so it is never written again."""

    url: str
    job: SaveJob
    written: list[WrittenFile]
    segment: Segment
    lent: bool = False


def look_at(segment: Segment) -> Segment:
    """The same memory, whatever becomes of the other holder's descriptor."""
    return Segment(os.dup(segment.descriptor), writable=False)


class Incoming:
    """An image under way: bytes are checksummed as they come in. Order of calls: `fill` until `left` is 0, `check`."""

    def __init__(self, job: SaveJob, segment: Segment) -> None:
        segment.reserve(job.size_bytes)
        self.job, self.segment = job, segment
        self._memory = segment.view()
        self._sums = [SpanChecksums(file.spans) for file in job.files]
        self._done = 0

    @property
    def left(self) -> int:
        return self.job.size_bytes - self._done

    def fill(self, receive: Callable[[memoryview], int], most_bytes: int) -> None:
        """Takes one piece: `receive` puts it into the memory that it is given, and says how much it was."""
        start = self._done
        self._done += receive(self._memory[start : start + min(most_bytes, self.left)])
        for file, sums in zip(self.job.files, self._sums, strict=True):
            first, last = max(start, file.start), min(self._done, file.start + file.size_bytes)
            if first < last:
                sums.see(self._memory[first:last])

    def check(self, told: list[WrittenFile]) -> list[WrittenFile]:
        """What came in, if it is what was sent.

        Raises:
            PeerError: names the file and the range that differs.
        """
        found = [written_of(file, sums) for file, sums in zip(self.job.files, self._sums, strict=True)]
        if [file.name for file in told] != [file.name for file in found]:
            raise PeerError(
                f"it sent the sums of {[file.name for file in told]}; expected those of {[file.name for file in found]}"
            )
        for sent, came in zip(told, found, strict=True):
            for one, other in zip(sent.spans, came.spans, strict=False):
                if one != other:
                    raise PeerError(
                        f"{came.name}, bytes {other.offset} to {other.offset + other.size_bytes}: what came in is not "
                        "what was sent"
                    )
            if sent != came:
                raise PeerError(f"{came.name}: what came in is not what was sent")
        return found


class Guests:
    """Order of calls: `admit`, then `keep` or `drop` what it gave.

    Args:
        most: ranks whose images are kept.
        free_bytes: memory that is free just now.
    """

    def __init__(self, most: int, free_bytes: Callable[[], int]) -> None:
        self._most = most
        self._free_bytes = free_bytes
        self._lock = threading.Lock()
        self._images: dict[int, _Guest] = {}
        self._spare: Segment | None = None
        self._generation = 0

    def note_generation(self, generation: int) -> None:
        """The run is at this one; what earlier ones still send is not taken."""
        with self._lock:
            self._generation = max(self._generation, generation)

    def admit(self, job: SaveJob) -> Incoming:
        """Room for an image.

        Raises:
            PeerError: it is stale, one too many or too large.
        """
        with self._lock:
            known = self._images.get(job.rank)
            newest = max(self._generation, known.job.generation if known is not None else 0)
            if job.generation < newest:
                raise PeerError(f"stale generation {job.generation}: this run is at generation {newest}")
            self._giving_way(job)
            spare, self._spare = self._spare, None
        segment = spare if spare is not None else Segment()
        try:
            require_room(job.size_bytes - segment.size_bytes, self._free_bytes())
        except PeerError:
            segment.close()
            raise
        return Incoming(job, segment)

    def keep(self, url: str, incoming: Incoming, written: list[WrittenFile]) -> None:
        """The image is complete; the rank's earlier one goes.

        Raises:
            PeerError: a newer generation's has come in meanwhile.
        """
        job = incoming.job
        leaving: _Guest | None = None
        try:
            with self._lock:
                known = self._images.get(job.rank)
                if job.generation < max(self._generation, known.job.generation if known is not None else 0):
                    raise PeerError(f"stale generation {job.generation}")
                leaving = self._images.pop(self._giving_way(job), None)
                self._images[job.rank] = _Guest(url=url, job=job, written=written, segment=incoming.segment)
        except PeerError:
            self.drop(incoming)
            raise
        if leaving is not None:
            self._put_aside(leaving.segment, lent=leaving.lent)

    def _giving_way(self, job: SaveJob) -> int:
        """The rank whose image goes for this one: its own earlier one; else, where all places are taken, one that an
        earlier generation left, whose ranks had other numbers.

        Raises:
            PeerError: there is none.
        """
        if job.rank in self._images or len(self._images) < self._most:
            return job.rank
        rank = min(self._images, key=lambda rank: self._images[rank].job.generation)
        if self._images[rank].job.generation >= job.generation:
            raise PeerError(f"images of {self._most} ranks are kept here already ({sorted(self._images)})")
        return rank

    def drop(self, incoming: Incoming) -> None:
        """It did not come in whole."""
        self._put_aside(incoming.segment, lent=False)

    def _put_aside(self, segment: Segment, *, lent: bool) -> None:
        """Kept for the next image: its pages are warm. One at most."""
        with self._lock:
            if not lent and self._spare is None:
                self._spare = segment
                return
        segment.close()

    def lend(self, url: str) -> list[Loan]:
        """All images of a root."""
        with self._lock:
            found = [guest for _, guest in sorted(self._images.items()) if guest.url == url]
            for guest in found:
                guest.lent = True
            return [
                Loan(job=guest.job, written=guest.written, segment=look_at(guest.segment)) for guest in found
            ]  # fmt: skip


def require_room(more_bytes: int, free_bytes: int) -> None:
    """Raises PeerError where an image would take more than its part of the memory that is free."""
    if more_bytes > MOST_OF_FREE_MEMORY * free_bytes:
        raise PeerError(
            f"no room: {more_bytes} more bytes are needed, {free_bytes} are free, half of which may be taken"
        )


def free_memory_bytes() -> int:
    """What this machine has free, or what its control group still allows."""
    told = pathlib.Path("/proc/meminfo").read_text().split("MemAvailable:", 1)[1]
    free = int(told.split(None, 1)[0]) * 1024
    group = pathlib.Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - used)
