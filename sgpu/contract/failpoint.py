"""Named places where a test makes the product fail. Off and nearly free unless SGPU_FAILPOINT names one.

    SGPU_FAILPOINT="checkpoint.shard_written@1#2=kill; metrics.flush=errno:ENOSPC; training.step@0%7!=hold"

`name[@rank][#nth][%step][!]=action`, several separated by `;`. `#nth` counts from 1 in each process and fires once;
without it the point fires each time. `%step`: in this step of the training, where the point knows it. `!`: once in all
processes together that share SGPU_FAILPOINT_LOG, so that a restarted worker does not meet it again. Actions: kill
(SIGKILL to itself), signal:NAME, exit:N, raise:Name (a built-in exception), errno:NAME (OSError), sleep:SECONDS, stop
(SIGSTOP to itself), hang (waits for ever), spin (computes for ever), hold (waits for ever and holds the interpreter's
lock), flip (a bit of the file that has just been written). `register` adds others. A point that fired leaves a line in
the file named by SGPU_FAILPOINT_LOG, so that a test can assert that its fault happened.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import os
import pathlib
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from sgpu import settings
from sgpu.contract.errors import InputError

_PATTERN = re.compile(
    r"(?P<name>[\w.]+)(@(?P<rank>\d+))?(#(?P<nth>\d+))?(%(?P<step>\d+))?(?P<once>!)?=(?P<action>\w+)(:(?P<value>[\w.]+))?"
)
_LONG_SECONDS = 3600


@dataclass(frozen=True, kw_only=True)
class Failpoint:
    """One fault. `number`: its place in the setting."""

    name: str
    rank: int | None
    nth: int | None
    action: str
    value: str
    step: int | None = None
    once: bool = False
    number: int = 0


@dataclass(frozen=True, kw_only=True)
class Action:
    """What a point does.

    Attributes:
        act: gets the point, and the file that was just written there, where there is one.
        takes: whether a value makes sense.
    """

    act: Callable[[Failpoint, pathlib.Path | None], None]
    takes: Callable[[str], bool] = lambda value: value == ""


def _exception(name: str) -> type[BaseException] | None:
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _is_signal(name: str) -> bool:
    return name in signal.Signals.__members__


def _signal(point: Failpoint, _: pathlib.Path | None) -> None:
    named = {"kill": "SIGKILL", "stop": "SIGSTOP"}.get(point.action, point.value)
    os.kill(os.getpid(), signal.Signals[named])


def _hang(_point: Failpoint, _: pathlib.Path | None) -> None:
    while True:
        time.sleep(_LONG_SECONDS)


def _spin(_point: Failpoint, _: pathlib.Path | None) -> None:
    while True:
        pass


def _hold(_point: Failpoint, _: pathlib.Path | None) -> None:
    # A deadlock, in a call during which PyDLL keeps the lock: no signal ends it, as it would end a sleep.
    lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)


def _errno(point: Failpoint, _: pathlib.Path | None) -> None:
    number = getattr(errno, point.value)
    raise OSError(number, os.strerror(number), f"failpoint {point.name}")


def _raise(point: Failpoint, _: pathlib.Path | None) -> None:
    kind = _exception(point.value) or RuntimeError
    raise kind(f"failpoint {point.name}")


def _flip(_point: Failpoint, file: pathlib.Path | None) -> None:
    if file is None or not file.stat().st_size:
        return
    with file.open("r+b") as content:
        content.seek(file.stat().st_size // 2)
        byte = content.read(1)
        content.seek(-1, os.SEEK_CUR)
        content.write(bytes([byte[0] ^ 1]))


_actions: dict[str, Action] = {
    "kill": Action(act=_signal),
    "stop": Action(act=_signal),
    "signal": Action(act=_signal, takes=_is_signal),
    "exit": Action(act=lambda point, _: os._exit(int(point.value)), takes=str.isdecimal),
    "sleep": Action(
        act=lambda point, _: time.sleep(float(point.value)),
        takes=lambda value: re.fullmatch(r"\d+(\.\d+)?", value) is not None,
    ),
    "hang": Action(act=_hang),
    "spin": Action(act=_spin),
    "hold": Action(act=_hold),
    "errno": Action(act=_errno, takes=lambda value: value in errno.errorcode.values()),
    "raise": Action(act=_raise, takes=lambda value: _exception(value) is not None),
    "flip": Action(act=_flip),
}


def register(name: str, action: Action) -> None:
    """Adds an action of a test's own; its processes have to be forked from the one that did."""
    _actions[name] = action


def parse(text: str) -> tuple[Failpoint, ...]:
    points: list[Failpoint] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _PATTERN.fullmatch(part)
        action = _actions.get(match["action"]) if match is not None else None
        if match is None or match["nth"] == "0" or action is None or not action.takes(match["value"] or ""):
            raise InputError(
                "SGPU_FAILPOINT: expected name[@rank][#nth][%step][!]=action, nth from 1, action one of kill, stop, "
                f"hang, spin, hold, flip, exit:N, sleep:SECONDS, errno:NAME, raise:Name, signal:NAME; found {part!r}"
            )
        points.append(Failpoint(
            name=match["name"], rank=int(match["rank"]) if match["rank"] else None,
            nth=int(match["nth"]) if match["nth"] else None, action=match["action"], value=match["value"] or "",
            step=int(match["step"]) if match["step"] else None, once=match["once"] is not None, number=len(points),
        ))  # fmt: skip
    return tuple(points)


_armed: tuple[Failpoint, ...] | None = None
_passed: dict[str, int] = {}


def failpoint(name: str, rank: int | None = None, *, step: int | None = None, file: pathlib.Path | None = None) -> None:
    """Marks a place; does nothing unless a test armed it.

    Args:
        rank: whose place it is; None: this worker's.
        step: of the training, where it is known.
        file: what has just been written.
    """
    global _armed
    if _armed is None:
        _armed = parse(settings.failpoints())
    if not _armed:
        return
    _passed[name] = count = _passed.get(name, 0) + 1
    if rank is None:
        worker = settings.worker_environment()
        rank = worker.rank if worker else None
    for point in _armed:
        told = (point.rank, rank), (point.nth, count), (point.step, step)
        if point.name == name and all(asked in (None, found) for asked, found in told) and _is_first(point):
            _note(point, rank, count)
            _actions[point.action].act(point, file)


def reset() -> None:
    """Reads the setting again at the next point (after a fork, or in a test)."""
    global _armed
    _armed = None
    _passed.clear()


def _is_first(point: Failpoint) -> bool:
    """Whether a point that fires once has not, in any process; none fires once the log's folder is gone."""
    log = settings.failpoint_log()
    if log is not None and not log.parent.is_dir():
        return False  # the drill is over, and its run was resumed
    if not point.once or log is None:
        return not point.once or _passed[point.name] == 1
    try:
        os.close(os.open(f"{log}.{point.number}", os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True


def _note(point: Failpoint, rank: int | None, count: int) -> None:
    log = settings.failpoint_log()
    if log is not None:
        with log.open("a") as file:
            file.write(f"{point.name} rank={rank} nth={count} action={point.action}\n")
