"""Which probes there are: light ones for the agent, all of them for `sgpu doctor`."""

from __future__ import annotations

from typing import Literal

from sgpu.health.disk import Room, Writing
from sgpu.health.gpu import Gpus
from sgpu.health.kernel import KernelLog, PcieErrors
from sgpu.health.known import KnownAnswers
from sgpu.health.machine import Clock, Limits, Memory, SharedMemory
from sgpu.health.nic import Ports
from sgpu.health.nvml import NvmlGpus
from sgpu.health.probe import Context, Probe
from sgpu.health.recorded import RecordedGpus

Level = Literal["light", "full"]


def probes(level: Level, ctx: Context) -> tuple[Probe, ...]:
    """Those of a level, in the order in which they are shown."""
    gpus = Gpus(RecordedGpus() if ctx.recorded else NvmlGpus())
    light: tuple[Probe, ...] = (
        gpus, KernelLog(), PcieErrors(), Ports(), Memory(), SharedMemory(), Limits(), Room(), Writing(speed=False),
    )  # fmt: skip
    return light if level == "light" else (*light, Writing(speed=True), Clock(), KnownAnswers())
