"""A loader's hold on its fetcher process: started, told how far the loop is, ended."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import weakref
from dataclasses import asdict

import sgpu
from sgpu import settings
from sgpu.data.fetcher import PROGRESS
from sgpu.data.source import Source
from sgpu.data.walk import WalkPlan, walk

_WORTHWHILE_FILES = 64
_PROBED_STEPS = 64
_PROBED_FILES = 256
_END_SECONDS = 5.0


class Ahead:
    """One fetcher for one source and plan. Its death costs speed alone: workers fetch for themselves."""

    def __init__(self, source: Source, plan: WalkPlan, version: int, epoch: int, cursor: int) -> None:
        self.source, self.plan = source, plan
        above = str(pathlib.Path(sgpu.__file__).parent.parent)
        environment = settings.inherited()
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (above, environment.get("PYTHONPATH"))))
        hears, self._pipe = os.pipe()  # not Popen's: a fork closes its copy, and nothing may close that number again
        _parents_only.add(self._pipe)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "sgpu.data.fetcher"], stdin=hears, stdout=subprocess.DEVNULL, env=environment
            )
        finally:
            os.close(hears)
        self._closer = weakref.finalize(self, _end, self._process, self._pipe, os.getpid())
        told = {
            "parent": os.getpid(), "source": source.description(), "plan": asdict(plan),
            "start": [version, epoch, cursor],
        }  # fmt: skip
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, json.dumps(told).encode() + b"\n")
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


_parents_only: set[int] = set()


def _forget_pipes() -> None:
    """A forked worker that kept a pipe open would keep the fetcher alive."""
    for descriptor in _parents_only:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _parents_only.clear()


os.register_at_fork(after_in_child=_forget_pipes)


def _end(process: subprocess.Popen[bytes], pipe: int, pid: int) -> None:
    if os.getpid() != pid:
        return
    _parents_only.discard(pipe)
    os.close(pipe)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


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
