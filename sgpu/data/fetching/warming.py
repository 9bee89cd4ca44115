"""Bringing a whole volume into the cache before or while it is used: the handle, its process and what that does.

`python -m sgpu.data.fetching.warming` is the process. It writes a line of JSON for each step of its progress.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any

import numpy as np
from rich.filesize import decimal

from sgpu.contract.errors import FetchError
from sgpu.data.caching.arrivals import Arrivals, Outcome
from sgpu.data.fetching import child
from sgpu.data.fetching.fetcher import bounds
from sgpu.data.fetching.lanes import Lanes
from sgpu.data.ordering.order import Indices
from sgpu.data.ordering.order import order as order_of
from sgpu.data.source import Source

_TOLD_EVERY_SECONDS = 0.2
_NICENESS = 10


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a prefetch is.

    Attributes:
        files, size_bytes: of the volume.
        done: files that are in the cache now, or were looked at and found no room.
        done_bytes: of these.
        without_room: files for which the cache has no room; they are read around it when they are wanted.
        failed: files that could not be read; `problem` tells the first.
    """

    files: int
    size_bytes: int
    done: int = 0
    done_bytes: int = 0
    without_room: int = 0
    failed: int = 0
    problem: str = ""
    seconds: float = 0.0

    @property
    def is_done(self) -> bool:
        return self.done == self.files

    def __str__(self) -> str:
        """One line: share, files, bytes, speed."""
        filled = int(20 * self.done / self.files)
        speed = int(self.done_bytes / self.seconds) if self.seconds else 0
        line = (
            f"[{'#' * filled}{'.' * (20 - filled)}] {self.done:,} of {self.files:,} files, "
            f"{decimal(self.done_bytes)} of {decimal(self.size_bytes)}, {decimal(speed)}/s"
        )
        if self.without_room:
            line += f", no room for {self.without_room:,}"
        return line + (f", {self.failed:,} failed" if self.failed else "")


def bring_all(source: Source, numbers: Indices, tell: Callable[[Progress], None]) -> Progress:
    """Brings files in this order, many at a time, and tells of it about five times a second, and at the end."""
    began, last = time.monotonic(), 0.0
    now = Progress(files=len(source), size_bytes=source.listing.total_bytes)
    lock = threading.Lock()

    def told(number: int, outcome: Outcome) -> None:
        nonlocal now, last
        with lock:
            now = Progress(
                files=now.files, size_bytes=now.size_bytes, done=now.done + 1,
                done_bytes=now.done_bytes + (int(source.listing.sizes[number]) if outcome.here else 0),
                without_room=now.without_room + (not outcome.here and not outcome.problem),
                failed=now.failed + bool(outcome.problem), problem=now.problem or outcome.problem,
                seconds=time.monotonic() - began,
            )  # fmt: skip
            if now.seconds - last >= _TOLD_EVERY_SECONDS:
                last = now.seconds
                tell(now)

    arrivals = Arrivals(source.cache, told)

    lanes = Lanes(bounds(source, 1).flight)
    lanes.submit(partial(arrivals.bring, number) for number in numbers.tolist())
    lanes.drain()
    tell(now)
    return now


class Warming:
    """A prefetch under way. It ends with this process, by `cancel`, or when nobody holds it any more."""

    def __init__(self, source: Source, *, seed: int, epoch: int, shuffle: bool, first: float, shown: bool) -> None:
        self._url, self._shown = source.volume.url, _Bar() if shown else None
        self._progress = Progress(files=len(source), size_bytes=source.listing.total_bytes)
        plan: dict[str, Any] = {"seed": seed, "epoch": epoch, "shuffle": shuffle, "first": first}
        self._process: subprocess.Popen[bytes] | None = None
        if source.volume.url.startswith("memory://"):  # no other process sees it
            bring_all(source, wanted(source, **plan), self._told)
            return
        self._process, pipe = child.start("sgpu.data.fetching.warming", source, {"plan": plan}, stdout=subprocess.PIPE)
        self._end = weakref.finalize(self, child.end, self._process, pipe, os.getpid())
        reader = weakref.ref(self)
        self._reader = threading.Thread(target=_follow, args=(reader, self._process.stdout), daemon=True)
        self._reader.start()

    @property
    def progress(self) -> Progress:
        return self._progress

    def _told(self, progress: Progress) -> None:
        self._progress = progress
        if self._shown is not None:
            self._shown.show(progress)

    def wait(self, timeout_seconds: float | None = None) -> Progress:
        """Until every file is here or has found no room.

        Raises:
            TimeoutError: it is not, yet; it goes on.
            FetchError: files could not be read (the rest is here), or the process was killed.
        """
        if self._process is not None:
            self._reader.join(timeout_seconds)
            if self._reader.is_alive():
                raise TimeoutError(f"prefetching {self._url} has not ended after {timeout_seconds} s: {self._progress}")
            self._end()
        found = self._progress
        if found.failed:
            raise FetchError(
                f"{found.failed} of {found.files} files of {self._url} could not be prefetched; the first: "
                f"{found.problem}",
                url=self._url,
            )
        if not found.is_done:
            raise FetchError(f"prefetching {self._url} was ended early: {found}", url=self._url)
        return found

    def cancel(self) -> None:
        """What is here stays."""
        if self._process is not None:
            self._end()
            self._reader.join()

    def __repr__(self) -> str:
        return f"<prefetch of {self._url}: {self._progress}>"


def _follow(owner: weakref.ref[Warming], output: IO[bytes] | None) -> None:
    if output is None:
        return
    with output:
        for line in output:
            handle = owner()
            if handle is None:
                return
            handle._told(Progress(**json.loads(line)))
            del handle


class _Bar:
    """A line of text that is drawn over itself, or, where that cannot be, one for each tenth."""

    def __init__(self) -> None:
        self._tenth = -1

    def show(self, progress: Progress) -> None:
        if sys.stderr.isatty():
            end = "\n" if progress.is_done else ""
            sys.stderr.write(f"\r{progress}{end}")
        elif (tenth := 10 * progress.done // progress.files) > self._tenth:
            self._tenth = tenth
            sys.stderr.write(f"{progress}\n")
        sys.stderr.flush()


def wanted(source: Source, *, seed: int, epoch: int, shuffle: bool, first: float) -> Indices:
    """All files in the order in which a pass wants them, from `first` (a share of them) on and around."""
    positions = np.roll(np.arange(len(source), dtype=np.int64), -int(first * len(source)))
    return order_of(positions, samples=len(source), seed=seed, epoch=epoch, shuffle=shuffle)


def main() -> None:
    told, source = child.begin()
    os.nice(_NICENESS)
    threading.Thread(target=_leave_with_input, args=(source,), daemon=True).start()

    def tell(progress: Progress) -> None:
        sys.stdout.write(json.dumps(asdict(progress)) + "\n")
        sys.stdout.flush()

    bring_all(source, wanted(source, **told["plan"]), tell)
    child.leave(source)


def _leave_with_input(source: Source) -> None:
    while os.read(sys.stdin.fileno(), 1 << 10):
        continue
    child.leave(source)


if __name__ == "__main__":
    main()
