"""Processes that bring files here beside a loop: executed, not forked; told on their standard input; dying with us."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
from typing import IO, Any

import sgpu
from sgpu import settings
from sgpu.data.processes import living
from sgpu.data.processes.forking import objects_frozen
from sgpu.data.source import Source
from sgpu.data.volumes.opening import access_of, hasten

_PR_SET_PDEATHSIG = 1
_END_SECONDS = 5.0
_parents_only: set[int] = set()


# ---- this side


def start(
    module: str, source: Source, told: dict[str, Any], *, stdout: int | IO[Any]
) -> tuple[subprocess.Popen[bytes], int]:
    """Runs a module with one line of JSON on its input: `told`, the source, and access to it (keys: nowhere else).

    Returns the process, and the end of the pipe that it hears.
    """
    above = str(pathlib.Path(sgpu.__file__).parent.parent)
    environment = settings.inherited()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (above, environment.get("PYTHONPATH"))))
    environment.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads would spin, and multiply nothing
    with objects_frozen():
        access = access_of(source.volume)
    whole = {**told, "parent": os.getpid(), "source": source.description(), "access": access}
    line = json.dumps(whole).encode() + b"\n"
    hears, pipe = os.pipe()  # not Popen's: a fork closes its copy, and nothing may close that number again
    _parents_only.add(pipe)
    try:
        process = subprocess.Popen([sys.executable, "-m", module], stdin=hears, stdout=stdout, env=environment)
    finally:
        os.close(hears)
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, line)
    return process, pipe


def end(process: subprocess.Popen[bytes], pipe: int, pid: int) -> None:
    """Ends it, where this is still the process (`pid`) that started it."""
    if os.getpid() != pid:
        return
    _parents_only.discard(pipe)
    with contextlib.suppress(OSError):
        os.close(pipe)
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _forget_pipes() -> None:
    """A forked worker that kept a pipe open would keep the process alive."""
    for descriptor in _parents_only:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _parents_only.clear()


os.register_at_fork(after_in_child=_forget_pipes)


# ---- the process' side


def begin() -> tuple[dict[str, Any], Source]:
    """What it was told, and the source; from here on it dies with its parent, and leaves nothing at SIGTERM."""
    told: dict[str, Any] = json.loads(_read_line())
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere the end of input ends it
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != told["parent"]:
        os._exit(0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted cell is the loop's business
    source = Source.from_description(told["source"], told["access"])
    hasten(source.volume)
    signal.signal(signal.SIGTERM, lambda *_: leave(source))
    return told, source


def _read_line() -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        piece = os.read(sys.stdin.fileno(), 1)
        if not piece:
            os._exit(0)
        line += piece
    return bytes(line)


def leave(source: Source) -> None:
    """Ends at once: threads may hang in a mount. Parts of files go with this process."""
    living.remove_own_named(source.cache.room.state / "parts")
    living.remove_own_named(source.cache.room.state / "claims")
    os._exit(0)
