"""The node itself: memory, shared memory, clock, processes' limits."""

from __future__ import annotations

import ctypes
import os
import pathlib
import resource
import time
from collections.abc import Iterator

from sgpu.health.probe import Context, Finding, ScopeKind, Verdict

_SCARCE_SHARE = 0.05
_LEAST_SHARED_BYTES = 64 * 2**20  # Docker's default, on which loaders with workers die of bus errors
_LEAST_FILES = 1024
_EPOCH = 1_700_000_000  # this code is younger
_UNSYNCHRONISED = 5  # TIME_ERROR of adjtimex(2)
_TIMEX_BYTES = 1024


class Memory:
    name = "memory"
    kind: ScopeKind = "node"

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        figures = dict(_meminfo(pathlib.Path(ctx.proc, "meminfo").read_text()))
        total, free = figures["MemTotal"], figures["MemAvailable"]
        limit = _cgroup_limit(ctx)
        told = f"{free / 1e9:.1f} GB available of {total / 1e9:.1f} GB"
        if limit is not None and limit < total:
            told += f"; the cgroup allows {limit / 1e9:.1f} GB"
        verdict = Verdict.DEGRADED if free < _SCARCE_SHARE * total else Verdict.OK
        if verdict is Verdict.DEGRADED:
            told += f"; expected at least {_SCARCE_SHARE:.0%}: workers may be killed for want of memory"
        yield Finding(probe=self.name, kind=self.kind, name="", verdict=verdict, evidence=told)


class SharedMemory:
    name = "shared memory"
    kind: ScopeKind = "node"

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        try:
            usage = os.statvfs(ctx.shared_memory)
        except FileNotFoundError:
            yield Finding(
                probe=self.name, kind=self.kind, name="", verdict=Verdict.FAILED, at_once=True,
                evidence=f"there is no {ctx.shared_memory}; loaders with workers cannot pass tensors",
            )  # fmt: skip
            return
        total, free = usage.f_blocks * usage.f_frsize, usage.f_bavail * usage.f_frsize
        told, verdict = f"{free / 1e9:.2f} GB free of {total / 1e9:.2f} GB", Verdict.OK
        if free < _LEAST_SHARED_BYTES or total <= _LEAST_SHARED_BYTES:
            verdict = Verdict.DEGRADED
            told += "; loaders with workers need more (docker run --ipc=host, or --shm-size)"
        yield Finding(probe=self.name, kind=self.kind, name="", verdict=verdict, evidence=told)


class Clock:
    name = "clock"
    kind: ScopeKind = "node"

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        now = time.time()
        if now < _EPOCH:
            evidence = f"it says {time.strftime('%Y-%m-%d', time.gmtime(now))}: certificates and tokens will be refused"
            yield Finding(probe=self.name, kind=self.kind, name="", verdict=Verdict.FAILED, evidence=evidence)
            return
        state = _adjtimex()
        verdict = Verdict.UNKNOWN if state < 0 else Verdict.DEGRADED if state == _UNSYNCHRONISED else Verdict.OK
        told = {
            Verdict.UNKNOWN: "the kernel does not tell whether it is synchronised",
            Verdict.DEGRADED: "not synchronised (adjtimex says TIME_ERROR); is chrony or ntpd running?",
            Verdict.OK: "synchronised",
        }
        yield Finding(probe=self.name, kind=self.kind, name="", verdict=verdict, evidence=told[verdict])


class Limits:
    name = "open files"
    kind: ScopeKind = "node"

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = soft != resource.RLIM_INFINITY and soft < _LEAST_FILES
        told = f"a process may open {'any number' if soft == resource.RLIM_INFINITY else soft}"
        if few:
            told += f"; expected at least {_LEAST_FILES}: raise it with ulimit -n (up to {hard})"
        verdict = Verdict.DEGRADED if few else Verdict.OK
        yield Finding(probe=self.name, kind=self.kind, name="", verdict=verdict, evidence=told)


def _meminfo(text: str) -> Iterator[tuple[str, int]]:
    """Bytes by name."""
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            yield name, int(words[0]) * (1024 if words[1:] == ["kB"] else 1)


def _cgroup_limit(ctx: Context) -> int | None:
    try:
        text = pathlib.Path(ctx.sys, "fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _adjtimex() -> int:
    """What the kernel says of its clock; below 0: nothing."""
    library = ctypes.CDLL(None)
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # modes = 0: asks, and changes nothing
    try:
        return int(library.adjtimex(buffer))
    except AttributeError:
        return -1
