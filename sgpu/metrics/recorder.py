"""The worker's side: values go to the rank's spool file. Never waits, never fails for a full disk, starts no thread."""

from __future__ import annotations

import json
import operator
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from sgpu.contract import atomic, events
from sgpu.contract.errors import InputError
from sgpu.contract.failpoint import failpoint
from sgpu.contract.rundir import RunDir
from sgpu.metrics import names, progress

LIMIT_BYTES = 256 * 2**20
_LINES_A_WRITE = 64
_SECONDS_A_WRITE = 0.2
_SECONDS_A_COMPACTION = 1.0
_SECONDS_A_COMPLAINT = 10.0


class Recorder:
    """Appends what one rank measured to its spool.

    Order of the calls: `log` any number of times, `flush` before a long silence, `close` at the end.

    A write happens inside `log`, at most every 0.2 s or 64 lines. Where it fails (disk full) or the spool has reached
    its limit, lines are dropped and counted, and the count is told as a `metrics_lost` event.
    """

    def __init__(self, run: RunDir, *, rank: int, generation: int, limit_bytes: int = LIMIT_BYTES) -> None:
        """
        Args:
            run: its folder exists.
            rank: whose spool.
            generation: goes into each line.
            limit_bytes: the spool file stays below; what MLflow has already is cut off it first.
        """
        if limit_bytes < 1:
            raise InputError(f"limit_bytes must be 1 or more; found {limit_bytes!r}")
        self._run, self._rank, self._generation, self._limit = run, rank, generation, limit_bytes
        self._path = run.spool(rank)
        self._known: set[str] = set()
        self._lines: list[dict[str, Any]] = []
        self._descriptor: int | None = None
        self._size = 0
        self._torn = False
        self._lost = 0
        self._cause = ""
        self._written_at = self._compacted_at = self._told_at = float("-inf")
        self._closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records values at a step.

        Args:
            step: optimizer step, 0 or more. A step at or below one that MLflow has for the same name counts as done
                again, and the first value stays.
            values: name to number; 0-dimensional tensors and NumPy scalars too. NaN and infinities are kept.

        Raises:
            InputError: a name or value that is no metric, or the recorder is closed. Nothing of the call is recorded.
        """
        number: dict[str, float] = {}
        for name, value in values.items():
            if name not in self._known:
                names.check(name)
                self._known.add(name)
            number[name] = value if type(value) is float else number_of(name, value)
        if self._closed:
            raise InputError(f"metrics at step {step} came after the recorder of rank {self._rank} was closed")
        if not number:
            return
        self._lines.append({"time": time.time(), "step": _step(step), "generation": self._generation, "values": number})
        if len(self._lines) >= _LINES_A_WRITE or time.monotonic() - self._written_at >= _SECONDS_A_WRITE:
            self.flush()

    def flush(self) -> None:
        """Writes what is buffered. Never raises for the disk: what cannot be written is counted."""
        self._written_at = time.monotonic()
        if self._lines:
            lines, self._lines = self._lines, []
            self._write([json.dumps(line) + "\n" for line in lines])
        if self._lost and self._written_at - self._told_at >= _SECONDS_A_COMPLAINT:
            self._tell_lost()

    def close(self) -> None:
        """Writes the rest and tells what was lost. Calling it again does nothing."""
        if self._closed:
            return
        self.flush()
        self._closed = True
        if self._lost and not self._tell_lost():
            print(f"sgpu: {self._lost} metric lines of rank {self._rank} were lost: {self._cause}", file=sys.stderr)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _write(self, lines: list[str]) -> None:
        data = "".join(lines).encode()
        try:
            failpoint("metrics.flush", self._rank)
            descriptor = self._open()
            if self._size + len(data) > self._limit:
                descriptor = self._compact(descriptor)
            if self._size + len(data) > self._limit:
                self._lose(len(lines), f"the spool {self._path} has reached its limit of {self._limit} bytes")
                return
            if self._torn:
                data = b"\n" + data  # ends the torn line, so that this one stands alone
            written = os.write(descriptor, data)
            self._size += written
        except OSError as error:
            self._lose(len(lines), f"{self._path}: {error.strerror or error}")
            return
        self._torn = written < len(data)
        if self._torn:
            self._lose(data[written:].count(b"\n"), f"{self._path}: the disk took only part of a write")

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._size = os.fstat(self._descriptor).st_size
            self._torn = self._size > 0 and os.pread(self._descriptor, 1, self._size - 1) != b"\n"
        return self._descriptor

    def _compact(self, descriptor: int) -> int:
        """Cuts off what the forwarder says MLflow has, by a new file with the rest."""
        now = time.monotonic()
        if now - self._compacted_at < _SECONDS_A_COMPACTION:
            return descriptor
        self._compacted_at = now
        done = progress.read(self._run).spools.get(self._rank)
        if done is None or done.inode != os.fstat(descriptor).st_ino or not 0 < done.offset <= self._size:
            return descriptor
        rest = os.pread(descriptor, self._size - done.offset, done.offset)
        atomic.write_bytes(self._path, rest, durable=False)
        os.close(descriptor)
        self._descriptor = None
        return self._open()

    def _lose(self, count: int, cause: str) -> None:
        self._lost += count
        self._cause = cause

    def _tell_lost(self) -> bool:
        self._told_at = time.monotonic()
        try:
            events.emit(
                self._run, "metrics_lost", generation=self._generation, rank=self._rank,
                count=self._lost, cause=self._cause,
            )  # fmt: skip
        except OSError:
            return False  # told at the next flush, or at close
        self._lost = 0
        return True


def _step(step: object) -> int:
    try:
        whole = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"a metric's step must be a whole number; found {step!r} ({type(step).__name__})") from None
    if whole < 0:
        raise InputError(f"a metric's step must be 0 or more; found {whole}")
    return whole


def number_of(name: str, value: Any) -> float:
    """A metric's value: a number, a 0-dimensional tensor or a NumPy scalar.

    Raises:
        InputError: it is anything else.
    """
    try:
        if isinstance(value, (str, bytes, bytearray)) or getattr(value, "ndim", 0) != 0:
            raise TypeError
        return float(value.item() if hasattr(value, "item") else value)  # float() of a loss with a gradient warns
    except (TypeError, ValueError, OverflowError, RuntimeError):
        shape = f", shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise InputError(
            f"metric {name!r} must be one number; found {value!r:.80} ({type(value).__name__}{shape}). "
            "Reduce it first, as with float(value.mean())."
        ) from None
