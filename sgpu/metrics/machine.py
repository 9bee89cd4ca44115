"""What each rank takes of this machine, sampled in a thread: a wedged GPU driver blocks nobody else."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import psutil

from sgpu.contract.heartbeat import Beat, WorkerState
from sgpu.metrics import names
from sgpu.metrics.progress import Point

_MOST_WAITING = 4096


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
        nvml, told = self._nvml, {}
        with contextlib.suppress(nvml.NVMLError):  # a figure that this GPU does not give (MIG) is left out
            handle = self._handle(local_rank)
            if handle is None:
                return {}
            told["gpu_memory_bytes"] = float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
            told["gpu_percent"] = float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            told["gpu_watts"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
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


class Sampler:
    """One look at every rank of this node each `period_seconds`, at whole seconds since the run was created."""

    def __init__(
        self,
        beats: Callable[[], Sequence[Beat]],
        *,
        ranks: range,
        created_seconds: float,
        period_seconds: float,
        open_gpus: Callable[[], Gpus],
    ) -> None:
        self._beats, self._ranks, self._created = beats, ranks, created_seconds
        self._period, self._open_gpus = period_seconds, open_gpus
        self._processes: dict[int, psutil.Process] = {}
        self._points: queue.Queue[Point] = queue.Queue(maxsize=_MOST_WAITING)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sgpu-machine-sampler", daemon=True)
        self.missed = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_seconds: float = 0.5) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def take(self, most: int) -> list[Point]:
        """What was sampled since."""
        taken: list[Point] = []
        with contextlib.suppress(queue.Empty):
            while len(taken) < most:
                taken.append(self._points.get_nowait())
        return taken

    def sample(self, gpus: Gpus, now_seconds: float) -> list[Point]:
        """One look. A process's first look only starts its CPU clock."""
        second = max(0, int(now_seconds - self._created))
        points = []
        for rank, beat in enumerate(self._beats()):
            if rank not in self._ranks or not beat.pid or beat.state is WorkerState.FINISHED:
                self._processes.pop(rank, None)
                continue
            told = {**self._of_process(rank, beat.pid), **gpus.read(rank - self._ranks.start)}
            points += [
                Point(key=names.for_system(rank, name), value=value, step=second, time_seconds=now_seconds)
                for name, value in told.items()
            ]
        return points

    def _of_process(self, rank: int, pid: int) -> dict[str, float]:
        try:
            process = self._processes.get(rank)
            if process is None or process.pid != pid or not process.is_running():
                self._processes[rank] = process = psutil.Process(pid)
                process.cpu_percent(None)
                return {"rss_bytes": float(process.memory_info().rss)}
            return {"cpu_percent": process.cpu_percent(None), "rss_bytes": float(process.memory_info().rss)}
        except psutil.Error:
            self._processes.pop(rank, None)
            return {}

    def _watch(self) -> None:
        gpus = self._open_gpus()
        while not self._stop.wait(self._period):
            for point in self.sample(gpus, time.time()):
                try:
                    self._points.put_nowait(point)
                except queue.Full:
                    self.missed += 1
