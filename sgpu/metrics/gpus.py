"""What GPUs tell of themselves, through the driver's library."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any, Protocol


class Gpus(Protocol):
    """Figures of the GPU that a local rank uses; empty where there is none."""

    def read(self, local_rank: int) -> dict[str, float]:
        """By names of `names.SYSTEM`."""


class NoGpus:
    def read(self, local_rank: int) -> dict[str, float]:
        return {}


class NvmlGpus:
    """Through the driver's library."""

    def __init__(self, nvml: Any, visible: str | None) -> None:
        """`nvml`: the module of nvidia-ml-py; `visible`: the workers' CUDA_VISIBLE_DEVICES."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._visible = [part.strip() for part in visible.split(",") if part.strip()] if visible else None

    def read(self, local_rank: int) -> dict[str, float]:
        nvml = self._nvml
        told: dict[str, float] = {}
        with contextlib.suppress(nvml.NVMLError):
            handle = self._handle(local_rank)
            if handle is None:
                return {}
            for figures in (_memory, _busy, _watts, _celsius):
                with contextlib.suppress(nvml.NVMLError):  # a figure that this GPU does not give (MIG) is left out
                    told |= figures(nvml, handle)
        return told

    def _handle(self, local_rank: int) -> Any:
        if self._visible is None:
            return self._nvml.nvmlDeviceGetHandleByIndex(local_rank)
        if local_rank >= len(self._visible):
            return None
        name = self._visible[local_rank]
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)


def find_gpus(visible: str | None) -> Gpus:
    """NVML where its library is installed and answers."""
    if importlib.util.find_spec("pynvml") is None:
        return NoGpus()
    nvml: Any = importlib.import_module("pynvml")
    try:
        return NvmlGpus(nvml, visible)
    except nvml.NVMLError:
        return NoGpus()


def _memory(nvml: Any, handle: Any) -> dict[str, float]:
    told = nvml.nvmlDeviceGetMemoryInfo(handle)
    return {"gpu_memory_bytes": float(told.used), "gpu_memory_total_bytes": float(told.total)}


def _busy(nvml: Any, handle: Any) -> dict[str, float]:
    return {"gpu_percent": float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)}


def _watts(nvml: Any, handle: Any) -> dict[str, float]:
    return {"gpu_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}


def _celsius(nvml: Any, handle: Any) -> dict[str, float]:
    return {"gpu_celsius": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))}
