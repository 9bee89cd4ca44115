"""Disks: room, whether they can be written, and how fast."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator

from sgpu.health.probe import Context, Finding, ScopeKind, Verdict

_SCARCE_BYTES = 2 * 10**9
_TRIED_BYTES = 8 * 2**20
_SLOW_BYTES_PER_SECOND = 20e6
_AWAY = {errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.EACCES, errno.EPERM}


class Room:
    name = "free space"
    kind: ScopeKind = "disk"

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        for folder in ctx.disks:
            usage = shutil.disk_usage(_nearest(folder))
            told = f"{usage.free / 1e9:.1f} GB free of {usage.total / 1e9:.1f} GB"
            scarce = usage.free < _SCARCE_BYTES
            if scarce:
                told += f"; expected at least {_SCARCE_BYTES / 1e9:g} GB"
            verdict = Verdict.DEGRADED if scarce else Verdict.OK
            yield Finding(probe=self.name, kind=self.kind, name=folder, verdict=verdict, evidence=told)


class Writing:
    """Writes a small file, or with `speed` one that can be timed, and removes it."""

    kind: ScopeKind = "disk"

    def __init__(self, *, speed: bool) -> None:
        self._speed = speed
        self.name = "write speed" if speed else "writable"

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        for folder in ctx.disks:
            verdict, told = self._try(_nearest(folder))
            yield Finding(probe=self.name, kind=self.kind, name=folder, verdict=verdict, evidence=told)

    def _try(self, folder: pathlib.Path) -> tuple[Verdict, str]:
        content = os.urandom(_TRIED_BYTES if self._speed else 512)
        began = time.perf_counter()
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                file.seek(0)
                same = file.read() == content
        except OSError as error:
            if error.errno not in _AWAY:
                return Verdict.UNKNOWN, f"{folder} could not be tried: {error}"
            return Verdict.FAILED, f"{folder} cannot be written: {os.strerror(error.errno or 0)}"
        if not same:
            return Verdict.FAILED, f"{folder} gave other bytes back than were written"
        if not self._speed:
            return Verdict.OK, "written, synchronised and read back"
        per_second = len(content) / (time.perf_counter() - began)
        told = f"{per_second / 1e6:.0f} MB/s, synchronised"
        if per_second < _SLOW_BYTES_PER_SECOND:
            return Verdict.DEGRADED, f"{told}; expected at least {_SLOW_BYTES_PER_SECOND / 1e6:g} MB/s"
        return Verdict.OK, told


def _nearest(folder: str) -> pathlib.Path:
    """The folder, or what of its path exists."""
    place = pathlib.Path(folder)
    return next(each for each in (place, *place.parents) if each.exists())
