"""The end of each rank's log, read as it grows.

Logs are raw bytes: progress bars return to the line's start, a line may be megabytes long, UTF-8 may be broken. A
refresh reads at most READ_BYTES of a rank, from the end; what it passes over is told.
"""

from __future__ import annotations

import os
import pathlib

from sgpu.contract.rundir import RunDir
from sgpu.widgets.reading.snapshot import LogTail
from sgpu.widgets.words import count, size, visible

READ_BYTES = 64 * 1024
KEEP_CHARS = 96 * 1024
LINE_BYTES = 4096
_KEEP_AFTER_CUT_CHARS = 64 * 1024


class OpenLine:
    """The line that a log ends with, while it may still change."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._kept = bytearray()
        self._total_bytes = 0
        self._returned = False
        self.beginning_lost = False

    def add(self, part: bytes) -> None:
        """`part` holds no line feed. A carriage return drops what was before it once something follows."""
        body = part.rstrip(b"\r")
        if body:
            _, returned, last = body.rpartition(b"\r")
            if returned or self._returned:
                self.clear()
            self._kept += last[: LINE_BYTES - len(self._kept)]
            self._total_bytes += len(last)
            self._returned = False
        self._returned = self._returned or len(body) < len(part)

    @property
    def empty(self) -> bool:
        return self._total_bytes == 0

    def text(self) -> str:
        start = "… " if self.beginning_lost else ""
        cut = f" … [line of {size(self._total_bytes)}, cut]" if self._total_bytes > len(self._kept) else ""
        return start + visible(bytes(self._kept).decode("utf-8", errors="replace")) + cut


class LogFollower:
    """One rank's log through all generations."""

    def __init__(self, run: RunDir, rank: int) -> None:
        self._run, self._rank = run, rank
        self._generation: int | None = None
        self._path = pathlib.Path()
        self._offset = 0
        self._lines: list[str] = []
        self._chars = 0
        self._first_line = 0
        self._open = OpenLine()
        self._made: LogTail | None = None

    def refresh(self, generations: list[int]) -> None:
        """Reads on; goes over to a newer generation's log once there is one.

        Args:
            generations: those that have a folder, in order.
        """
        if self._generation is not None:
            self._read()
        newer = [g for g in generations if self._generation is None or g > self._generation]
        newest = next((g for g in reversed(newer) if self._run.log(g, self._rank).exists()), None)
        if newest is None:
            return
        if self._generation is not None:
            self._note(f"──── restart {count(newest)} ────")
        self._generation, self._path, self._offset = newest, self._run.log(newest, self._rank), 0
        self._read()

    def tail(self) -> LogTail | None:
        """None while there is no log; the same object as long as nothing was read."""
        if self._generation is not None and self._made is None:
            last = () if self._open.empty else (self._open.text(),)
            self._made = LogTail(
                rank=self._rank,
                generation=self._generation,
                path=str(self._path),
                size_bytes=self._offset,
                first_line=self._first_line,
                lines=(*self._lines, *last),
            )
        return self._made

    def _read(self) -> None:
        try:
            with self._path.open("rb") as file:
                end = os.fstat(file.fileno()).st_size
                if end < self._offset:
                    self._note("──── the log was cut short by someone; from its beginning ────")
                    self._offset = 0
                start = max(self._offset, end - READ_BYTES)
                if end == start:
                    return
                file.seek(start)
                content = file.read(end - start)
        except FileNotFoundError:
            return
        self._made = None
        if start > self._offset:
            self._note(f"[{size(start - self._offset)} of the log are not shown here]")
            self._open.beginning_lost = True
            content = content.lstrip(bytes(range(0x80, 0xC0)))  # the rest of a character that was cut
        self._offset = end
        self._take(content)

    def _take(self, content: bytes) -> None:
        *whole, rest = content.split(b"\n")
        for part in whole:
            self._open.add(part)
            self._add_line(self._open.text())
            self._open.clear()
        self._open.add(rest)
        self._drop_front()

    def _note(self, text: str) -> None:
        if not self._open.empty:
            self._add_line(self._open.text())
        self._open.clear()
        self._add_line(text)
        self._made = None

    def _add_line(self, text: str) -> None:
        self._lines.append(text)
        self._chars += len(text) + 1

    def _drop_front(self) -> None:
        """Drops many lines now and then, so that what is kept mostly only grows at its end."""
        if self._chars <= KEEP_CHARS:
            return
        drop = 0
        while self._chars > _KEEP_AFTER_CUT_CHARS and drop < len(self._lines):
            self._chars -= len(self._lines[drop]) + 1
            drop += 1
        del self._lines[:drop]
        self._first_line += drop


class Logs:
    """All ranks' logs."""

    def __init__(self, run: RunDir, world_size: int) -> None:
        self._run = run
        self._followers = [LogFollower(run, rank) for rank in range(world_size)]

    def refresh(self) -> None:
        generations = self._run.generations()
        for follower in self._followers:
            follower.refresh(generations)

    def tails(self, front: int | None = None) -> tuple[LogTail, ...]:
        """By rank, that of rank `front` first."""
        tails = [tail for follower in self._followers if (tail := follower.tail()) is not None]
        return tuple(sorted(tails, key=lambda tail: (tail.rank != front, tail.rank)))
