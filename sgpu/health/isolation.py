"""Runs probes in processes of their own, all at once, and waits for none beyond the deadline.

Forks, so it is for a process that has one thread and no CUDA: the helper process (see __main__.py), nobody else.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sgpu.health.probe import Context, Finding, Probe, Verdict

_READ_BYTES = 1 << 16


@dataclass(kw_only=True)
class _Child:
    probe: Probe
    pid: int
    pipe: int
    said: bytearray = field(default_factory=bytearray)
    status: int | None = None


def run_all(probes: Sequence[Probe], ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
    """What the probes found, in their order. One that hangs, crashes or raises gives UNKNOWN, and what it told before.

    A child that cannot even be killed (it is stuck in the driver) is left behind.
    """
    deadline = time.monotonic() + timeout_seconds
    children = [_start(probe, ctx, timeout_seconds) for probe in probes]
    _listen(children, deadline)
    for child in children:
        yield from _findings(child, timeout_seconds)


def _start(probe: Probe, ctx: Context, timeout_seconds: float) -> _Child:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Child(probe=probe, pid=pid, pipe=reader)
    code = 1
    try:
        for finding in probe.run(ctx, timeout_seconds):
            os.write(writer, json.dumps(finding.to_dict()).encode() + b"\n")
        code = 0
    except BaseException:  # noqa: BLE001 - this process ends here; its parent tells
        last = traceback.format_exc(limit=-1).strip().splitlines()[-1]
        os.write(writer, json.dumps({"raised": last}).encode() + b"\n")
    finally:
        os._exit(code)


def _listen(children: Sequence[_Child], deadline: float) -> None:
    open_pipes = {child.pipe: child for child in children}
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for pipe in select.select(list(open_pipes), [], [], left)[0]:
            part = os.read(pipe, _READ_BYTES)
            if part:
                open_pipes[pipe].said += part
            else:
                child = open_pipes.pop(pipe)
                child.status = os.waitpid(child.pid, 0)[1]
    for child in open_pipes.values():
        os.kill(child.pid, signal.SIGKILL)
    for child in children:
        os.close(child.pipe)


def _findings(child: _Child, timeout_seconds: float) -> Iterator[Finding]:
    trouble = None
    if child.status is None:
        trouble = f"no answer within {timeout_seconds:g} s; a wedged driver or disk?"
    elif os.WIFSIGNALED(child.status):
        trouble = f"the probe ended by {signal.Signals(os.WTERMSIG(child.status)).name}"
    for line in child.said.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break  # it was killed in the middle of a word
        said = json.loads(line)
        if "raised" in said:
            trouble = f"the probe could not look: {said['raised']}"
        else:
            yield Finding.from_dict(said)
    if trouble is not None:
        probe = child.probe
        yield Finding(probe=probe.name, kind=probe.kind, name="", verdict=Verdict.UNKNOWN, evidence=trouble)
