"""GPUs: what their figures mean. Where the figures come from, nvml.py and recorded.py know."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sgpu.health.probe import Context, Finding, ScopeKind, Verdict

# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean trouble (nvml.h).
THROTTLES = {0x8: "HW slowdown", 0x20: "SW thermal", 0x40: "HW thermal", 0x80: "HW power brake"}


@dataclass(frozen=True, kw_only=True)
class GpuFigures:
    """One GPU as its driver tells it; None where it does not tell.

    Attributes:
        index: as nvidia-smi counts.
        lost: the driver's words, where the GPU has fallen off the bus or cannot be talked to.
        uncorrectable: ECC errors since the last reset that could not be corrected.
        remap_pending, remap_failed: rows of memory wait for a reset to be replaced, or cannot be replaced.
        throttles: bits of THROTTLES and harmless ones.
        links_up, links: NVLink lanes that are active, and how many there are.
        pcie_width, pcie_most: lanes in use, and possible.
    """

    index: int
    uuid: str = ""
    name: str = ""
    lost: str | None = None
    uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttles: int | None = None
    celsius: int | None = None
    links_up: int | None = None
    links: int | None = None
    pcie_width: int | None = None
    pcie_most: int | None = None


class GpuSource(Protocol):
    """Where figures come from."""

    def read(self, ctx: Context) -> Sequence[GpuFigures]:
        """Of all GPUs of this machine; empty where there are none. Raises SourceError where it cannot tell."""


class SourceError(Exception):
    """The figures cannot be had, and why."""


def judge(figures: GpuFigures, name: str | None = None) -> Iterator[Finding]:
    """What is wrong with a GPU; one OK where nothing is. A figure that is not told is named, not taken for good.

    `name`: what the user calls it; None: its index.
    """
    troubles = list(_troubles(figures))
    if figures.lost is None:
        unknown = [name for name, value in _vital(figures).items() if value is None]
        if unknown:
            told = f"the driver does not tell: {', '.join(unknown)}"
            troubles.append(("figures", Verdict.UNKNOWN, told, False))
    told = f"{figures.name or 'a GPU'}, {figures.celsius} °C" if figures.celsius is not None else figures.name
    for probe, verdict, evidence, at_once in troubles or [("figures", Verdict.OK, told or "no trouble", False)]:
        yield Finding(
            probe=probe,
            kind="gpu",
            name=name or str(figures.index),
            verdict=verdict,
            evidence=evidence,
            at_once=at_once,
        )


def _vital(figures: GpuFigures) -> dict[str, object]:
    return {"ECC errors": figures.uncorrectable, "row remapping": figures.remap_failed, "throttling": figures.throttles}


def _troubles(figures: GpuFigures) -> Iterator[tuple[str, Verdict, str, bool]]:
    if figures.lost is not None:
        yield "present", Verdict.FAILED, f"cannot be talked to: {figures.lost}; reset it or reboot", True
        return
    if figures.uncorrectable:
        told = f"{figures.uncorrectable} uncorrectable errors since its last reset, expected 0; reset it"
        yield "ECC", Verdict.FAILED, told, True
    if figures.remap_failed:
        yield "row remapping", Verdict.FAILED, "a row of memory could not be replaced; have the GPU replaced", True
    elif figures.remap_pending:
        yield "row remapping", Verdict.DEGRADED, "a row of memory waits to be replaced; reset the GPU", False
    reasons = [name for bit, name in THROTTLES.items() if (figures.throttles or 0) & bit]
    if reasons:
        yield "throttling", Verdict.DEGRADED, f"slowed by {', '.join(reasons)} at {figures.celsius} °C", False
    if figures.links and figures.links_up is not None and figures.links_up < figures.links:
        yield "NVLink", Verdict.DEGRADED, f"{figures.links_up} of {figures.links} lanes are up", False
    if figures.pcie_width and figures.pcie_most and figures.pcie_width < figures.pcie_most:
        yield "PCIe", Verdict.DEGRADED, f"x{figures.pcie_width} of x{figures.pcie_most}: reseat the card", False


class Gpus:
    """All visible GPUs, and those that should be visible and are not there."""

    name = "GPUs"
    kind: ScopeKind = "gpu"

    def __init__(self, source: GpuSource) -> None:
        self._source = source

    def run(self, ctx: Context, timeout_seconds: float) -> Iterator[Finding]:
        if ctx.gpus == ():
            return
        try:
            found = self._source.read(ctx)
        except SourceError as error:
            yield Finding(probe=self.name, kind="gpu", name="", verdict=Verdict.UNKNOWN, evidence=str(error))
            return
        for figures in found if ctx.gpus is None else ():
            yield from judge(figures)
        for name in ctx.gpus or ():
            chosen = next((figures for figures in found if _is_called(figures, name)), None)
            if chosen is not None:
                yield from judge(chosen, name)
            else:
                told = f"expected by CUDA_VISIBLE_DEVICES, and not among the {len(found)} that the driver knows"
                yield Finding(
                    probe="present", kind="gpu", name=name, verdict=Verdict.FAILED, evidence=told, at_once=True
                )  # fmt: skip


def _is_called(figures: GpuFigures, name: str) -> bool:
    """UUIDs may be shortened, as CUDA allows."""
    return name == str(figures.index) if name.isdecimal() else bool(name) and figures.uuid.startswith(name)
