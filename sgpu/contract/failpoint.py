"""Named places where a test makes the product fail. Off and nearly free unless SGPU_FAILPOINT names one.

    SGPU_FAILPOINT="checkpoint.shard_written@1#2=kill; metrics.flush=errno:ENOSPC"

`name[@rank][#nth]=action`, several separated by `;`. `#nth` counts from 1 in each process and fires once; without it
the point fires each time. Actions: kill (SIGKILL to itself), exit:N, raise:Name (a built-in exception), errno:NAME
(OSError), sleep:SECONDS, stop (SIGSTOP to itself), hang. Actions that change data (truncate, flip) belong to
the stores in `sgpu.testing`. A point that fired leaves a line in the file named by SGPU_FAILPOINT_LOG, so
that a test can assert that its fault happened.
"""

from __future__ import annotations

import builtins
import errno
import os
import re
import signal
import time
from dataclasses import dataclass

from sgpu import settings
from sgpu.contract.errors import InputError

_PATTERN = re.compile(r"(?P<name>[\w.]+)(@(?P<rank>\d+))?(#(?P<nth>\d+))?=(?P<action>\w+)(:(?P<value>[\w.]+))?")


def _makes_sense(action: str, value: str) -> bool:
    if action in ("kill", "stop", "hang"):
        return value == ""
    if action == "exit":
        return value.isdecimal()
    if action == "sleep":
        return re.fullmatch(r"\d+(\.\d+)?", value) is not None
    if action == "errno":
        return value in errno.errorcode.values()
    return action == "raise" and _exception(value) is not None


def _exception(name: str) -> type[BaseException] | None:
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


@dataclass(frozen=True, kw_only=True)
class Failpoint:
    name: str
    rank: int | None
    nth: int | None
    action: str
    value: str

    def act(self) -> None:
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.action == "exit":
            os._exit(int(self.value))
        elif self.action == "sleep":
            time.sleep(float(self.value))
        elif self.action == "hang":
            while True:
                time.sleep(3600)
        elif self.action == "errno":
            number = getattr(errno, self.value)
            raise OSError(number, os.strerror(number), f"failpoint {self.name}")
        elif self.action == "raise":
            kind = _exception(self.value) or RuntimeError
            raise kind(f"failpoint {self.name}")


def parse(text: str) -> tuple[Failpoint, ...]:
    points = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = _PATTERN.fullmatch(part)
        if match is None or match["nth"] == "0" or not _makes_sense(match["action"], match["value"] or ""):
            raise InputError(
                "SGPU_FAILPOINT: expected name[@rank][#nth]=action, nth from 1, action one of kill, stop, hang, "
                f"exit:N, sleep:SECONDS, errno:NAME, raise:Name; found {part!r}"
            )
        points.append(Failpoint(
            name=match["name"], rank=int(match["rank"]) if match["rank"] else None,
            nth=int(match["nth"]) if match["nth"] else None, action=match["action"], value=match["value"] or "",
        ))  # fmt: skip
    return tuple(points)


_armed: tuple[Failpoint, ...] | None = None
_passed: dict[str, int] = {}


def failpoint(name: str, rank: int | None = None) -> None:
    """Marks a place; does nothing unless a test armed it."""
    global _armed
    if _armed is None:
        _armed = parse(settings.failpoints())
    if not _armed:
        return
    _passed[name] = count = _passed.get(name, 0) + 1
    if rank is None:
        told = settings.worker_environment()
        rank = told.rank if told else None
    for point in _armed:
        if point.name == name and point.rank in (None, rank) and point.nth in (None, count):
            _note(point, rank, count)
            point.act()


def reset() -> None:
    """Reads the setting again at the next point (after a fork, or in a test)."""
    global _armed
    _armed = None
    _passed.clear()


def _note(point: Failpoint, rank: int | None, count: int) -> None:
    log = settings.failpoint_log()
    if log is not None:
        with log.open("a") as file:
            file.write(f"{point.name} rank={rank} nth={count} action={point.action}\n")
