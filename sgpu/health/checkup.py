"""One look at this machine, from a process that may be blocked by nothing: it starts the helper, and asks it later."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time

from sgpu import settings
from sgpu.health.checks import Level
from sgpu.health.probe import Context, Finding, Verdict

_HOME = str(pathlib.Path(__file__).parents[2])
_GRACE_SECONDS = 0.5  # the helper needs so long besides, to start and to tell
_READ_BYTES = 1 << 16


def context_here(*, disks: tuple[str, ...], gpus: tuple[str, ...] | None) -> Context:
    """What there is to look at on this machine, or what SGPU_HEALTH_RECORDED says in its place."""
    recorded = settings.health_recorded()
    return Context(
        disks=disks,
        gpus=gpus,
        recorded=str(recorded) if recorded else None,
        paths=tuple(path for path in sys.path if path),
    )


class Checkup:
    """Starts when made. Order of calls: `poll` until it is true (or `wait`), then `findings`; `close` at any time.

    Args:
        level: "light" needs no torch and a few hundredths of a second.
        timeout_seconds: what no probe may exceed.
    """

    def __init__(self, ctx: Context, *, level: Level = "light", timeout_seconds: float = 5.0) -> None:
        self._timeout_seconds = timeout_seconds
        self._patience_ends = time.monotonic() + timeout_seconds + _GRACE_SECONDS
        self._said = bytearray()
        self._ended = False
        full = level == "full"  # torch is needed, and found as this process finds it
        flags = [] if full else ["-S", "-s"]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-m", "sgpu.health", level, repr(timeout_seconds), json.dumps(ctx.to_dict())],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=_HOME,
            start_new_session=True, env=settings.inherited(),
        )  # fmt: skip
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)

    def pids(self) -> list[int]:
        """The helper's, while it lives."""
        return [self._process.pid] if self._process.returncode is None else []

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether it has answered, or will not any more; waits up to `seconds` for news."""
        if seconds > 0 and not self._ended:
            left = self._patience_ends - time.monotonic()
            select.select([self._pipe], [], [], max(0.0, min(seconds, left)))
        with contextlib.suppress(BlockingIOError):
            while not self._ended:
                part = os.read(self._pipe.fileno(), _READ_BYTES)
                self._said += part
                self._ended = not part
        return self._ended or time.monotonic() > self._patience_ends

    def wait(self) -> list[Finding]:
        """The findings, once it has answered."""
        while not self.poll(self._timeout_seconds):
            pass
        return self.findings()

    def findings(self) -> list[Finding]:
        """What it told; that it did not tell all is a finding too."""
        lines = bytes(self._said).rpartition(b"\n")[0].splitlines()
        found = [Finding.from_dict(json.loads(line)) for line in lines]
        in_full = self._ended
        status = self._close()
        if not in_full or status:
            why = f"ended with status {status}" if in_full else f"no answer within {self._timeout_seconds:g} s"
            found.append(
                Finding(probe="checks", kind="node", name="", verdict=Verdict.UNKNOWN, evidence=f"the checks: {why}")
            )
        return found

    def close(self) -> None:
        self._close()

    def _close(self) -> int:
        """Ends what is left of it."""
        self._pipe.close()
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        try:
            return self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:  # stuck in the kernel: not even this ends it
            return -signal.SIGKILL
