"""GPUs by the driver's library (nvidia-ml-py)."""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sgpu.health.gpu import GpuFigures, SourceError
from sgpu.health.probe import Context

_T = TypeVar("_T")


class NvmlGpus:
    """Order of the look: device files first, so that a machine without GPUs needs no library."""

    def read(self, ctx: Context) -> Sequence[GpuFigures]:
        present = [path.name for path in pathlib.Path(ctx.dev).glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        if not present:
            return []
        sys.path.extend(path for path in ctx.paths if path not in sys.path)
        if importlib.util.find_spec("pynvml") is None:
            raise SourceError(f"{len(present)} GPUs are not checked: pip install nvidia-ml-py (or sgpu[gpu])")
        nvml: Any = importlib.import_module("pynvml")
        try:
            nvml.nvmlInit()
            return [_figures(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            raise SourceError(f"the driver does not answer: {error}") from error


def _figures(nvml: Any, index: int) -> GpuFigures:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError as error:
        return GpuFigures(index=index, lost=str(error))

    def ask(question: Callable[[], _T]) -> _T | None:
        try:
            return question()
        except (nvml.NVMLError, AttributeError):  # this GPU, or this version of the library, does not tell
            return None

    remapped = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    up, links = _links(nvml, handle)
    return GpuFigures(
        index=index,
        uuid=uuid,
        name=_text(ask(lambda: nvml.nvmlDeviceGetName(handle)) or ""),
        uncorrectable=ask(
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        ),
        remap_pending=bool(remapped[2]) if remapped is not None else None,
        remap_failed=bool(remapped[3]) if remapped is not None else None,
        throttles=ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
        celsius=ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        links_up=up,
        links=links,
        pcie_width=ask(lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        pcie_most=ask(lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
    )


def _links(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """Lanes that are up, and how many there are; a GPU without NVLink has none."""
    states = []
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 0)):
        try:
            states.append(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            break
    return (sum(map(bool, states)), len(states)) if states else (None, None)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
