"""What the kernel has noticed of GPUs: XID messages in its log, and errors of the PCIe bus in sysfs."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator

from sgpu.health.probe import Context, Finding, ScopeKind, Verdict

# XIDs after which a GPU cannot be used until it is reset (NVIDIA's XID catalogue); others tell of a program's fault.
FATAL_XIDS = {
    46: "the GPU stopped processing", 48: "double-bit ECC error", 62: "internal micro-controller halt",
    64: "row remapper failure", 74: "NVLink error", 79: "the GPU has fallen off the bus",
    95: "uncontained memory error", 119: "the GSP does not answer", 120: "GSP error", 140: "unrecovered ECC error",
}  # fmt: skip
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_MOST_BYTES = 1 << 20
_LINE_BYTES = 8192


class KernelLog:
    name = "kernel log"
    kind: ScopeKind = "gpu"

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        if ctx.gpus == () or not pathlib.Path(ctx.sys, "module/nvidia").exists():
            return
        try:
            text = _read(pathlib.Path(ctx.dev, "kmsg"))
        except OSError as error:
            told = f"{ctx.dev}/kmsg cannot be read ({os.strerror(error.errno or 0)}); XIDs are not seen"
            yield Finding(probe=self.name, kind=self.kind, name="", verdict=Verdict.UNKNOWN, evidence=told)
            return
        yield from xids(text)


def xids(text: str) -> Iterator[Finding]:
    """One finding a GPU and XID since boot. A fatal one may have been cured by a reset since: it is no proof alone."""
    counts: dict[tuple[str, int], int] = {}
    for bus, number in _XID.findall(text):
        counts[bus, int(number)] = counts.get((bus, int(number)), 0) + 1
    for (bus, number), count in sorted(counts.items()):
        meaning = FATAL_XIDS.get(number)
        if meaning is not None:
            told = f"XID {number} ({meaning}), {count} times since boot"
            yield Finding(probe="XID", kind="gpu", name=bus, verdict=Verdict.DEGRADED, evidence=told)


class PcieErrors:
    """Advanced error reporting of NVIDIA's devices."""

    name = "PCIe errors"
    kind: ScopeKind = "gpu"

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        for counter in sorted(pathlib.Path(ctx.sys, "bus/pci/drivers/nvidia").glob("*/aer_dev_fatal")):
            try:
                total = _total(counter.read_text())
            except OSError:
                continue
            if total:
                told = f"{total} fatal errors of the bus since boot, expected 0"
                yield Finding(
                    probe=self.name, kind=self.kind, name=counter.parent.name, verdict=Verdict.DEGRADED, evidence=told
                )


def _total(text: str) -> int:
    found = re.search(r"TOTAL_ERR_FATAL (\d+)", text)
    return int(found[1]) if found else 0


def _read(path: pathlib.Path) -> str:
    """All that the log holds now. /dev/kmsg gives a message a read, and would wait for the next."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        parts, size = [], 0
        while size < _MOST_BYTES:
            try:
                part = os.read(descriptor, _LINE_BYTES)
            except BlockingIOError:
                break
            except BrokenPipeError:  # messages were dropped while this read; what is left follows
                continue
            if not part:
                break
            parts.append(part)
            size += len(part)
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace")
