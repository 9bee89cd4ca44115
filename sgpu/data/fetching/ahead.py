"""A loader's hold on its fetcher process: started, told how far the loop is, ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import weakref
from dataclasses import asdict

from sgpu.data.fetching import child
from sgpu.data.fetching.fetcher import PROGRESS
from sgpu.data.ordering.walk import WalkPlan, walk
from sgpu.data.source import Source

_WORTHWHILE_FILES = 64
_PROBED_STEPS = 64
_PROBED_FILES = 256


class Ahead:
    """One fetcher for one source and plan. Its death costs speed alone: workers fetch for themselves."""

    def __init__(self, source: Source, plan: WalkPlan, version: int, epoch: int, cursor: int) -> None:
        self.source, self.plan = source, plan
        told = {"plan": asdict(plan), "start": [version, epoch, cursor]}
        self._process, self._pipe = child.start("sgpu.data.fetching.fetcher", source, told, stdout=subprocess.DEVNULL)
        self._closer = weakref.finalize(self, child.end, self._process, self._pipe, os.getpid())
        os.set_blocking(self._pipe, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    def lives(self) -> bool:
        return self._process.poll() is None

    def tell(self, version: int, epoch: int, cursor: int) -> None:
        """Everything before this position is done. Never waits: the next record supersedes one that found no room."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._pipe, PROGRESS.pack(version, epoch, cursor))

    def close(self) -> None:
        self._closer()


def worthwhile(source: Source, plan: WalkPlan, epoch: int, cursor: int) -> bool:
    """Whether a fetcher would find something to do: enough files, of which the next are not here yet."""
    if len(source) < _WORTHWHILE_FILES or source.volume.url.startswith("memory://"):
        return False
    probed = 0
    for steps, stretch in enumerate(walk(plan, epoch, cursor)):
        for number in stretch.numbers.tolist():
            if not source.cache.has(number):
                return True
            probed += 1
        if probed >= min(_PROBED_FILES, len(source)) or steps >= _PROBED_STEPS:
            return False
    return False


class Follower:
    """Keeps a fetcher where the loop is, and none where it would find nothing to do."""

    def __init__(self) -> None:
        self._ahead: Ahead | None = None
        self._version = 0
        self._at = (0, 0)

    def begin(self, source: Source, plan: WalkPlan, at: tuple[int, int]) -> None:
        """A pass begins at this epoch and cursor."""
        if self._ahead is not None and self._ahead.lives() and self._ahead.plan == plan:
            if at != self._at:
                self._version += 1
                self._ahead.tell(self._version, *at)
        else:
            self.close()
            if worthwhile(source, plan, *at):
                self._version = 0
                self._ahead = Ahead(source, plan, 0, *at)
        self._at = at

    def tell(self, at: tuple[int, int]) -> None:
        """Everything before this epoch and cursor is done."""
        if self._ahead is not None:
            self._at = at
            self._ahead.tell(self._version, *at)

    @property
    def pid(self) -> int | None:
        """Of the fetcher process, while there is one."""
        return self._ahead.pid if self._ahead is not None and self._ahead.lives() else None

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
