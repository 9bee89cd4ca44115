"""What each rank takes of this machine, and the machine as a whole, sampled in a thread: a wedged GPU driver blocks
nobody else.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from sgpu.contract.heartbeat import Beat, WorkerState
from sgpu.metrics import names
from sgpu.metrics.gpus import Gpus
from sgpu.metrics.progress import Point

_MOST_WAITING = 4096
_FIRST_SECONDS = 1.0  # so that a short run has figures too


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One look.

    Attributes:
        time_seconds: since 1970. `second`: whole seconds since the run was created.
        whole: figures of the node, by names of `names.NODE`.
        ranks: those of each rank that runs there, by names of `names.SYSTEM`.
    """

    time_seconds: float
    second: int
    node: int
    whole: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def points(self) -> list[Point]:
        """What MLflow gets of it: all but what never changes."""
        named = [(names.for_node(self.node, name), value) for name, value in self.whole.items() if name in names.NODE]
        for rank, told in self.ranks.items():
            named += [(names.for_system(rank, name), value) for name, value in told.items() if name in names.SYSTEM]
        return [Point(key=key, value=value, step=self.second, time_seconds=self.time_seconds) for key, value in named]

    def record(self) -> dict[str, Any]:
        """As a line of the run folder."""
        ranks = {str(rank): dict(told) for rank, told in self.ranks.items()}
        return {"time": self.time_seconds, "second": self.second, "node": dict(self.whole), "ranks": ranks}


class Sampler:
    """One look at a node each `period_seconds`.

    Args:
        beats: tells the processes of all ranks.
        ranks: those of this node.
        created_seconds: when the run was, since 1970.
        whole: figures of the node as a whole.
        keep: called with each sample in the sampler's thread; an OSError of it is passed over (the disk is full).
        deliver: whether points wait for `take`.
    """

    def __init__(
        self,
        beats: Callable[[], Sequence[Beat]],
        *,
        ranks: range,
        created_seconds: float,
        period_seconds: float,
        open_gpus: Callable[[], Gpus],
        node: int = 0,
        whole: Callable[[], Mapping[str, float]] = dict,
        keep: Callable[[Sample], object] = lambda _: None,
        deliver: bool = True,
    ) -> None:
        self._beats, self._ranks, self._created, self._node = beats, ranks, created_seconds, node
        self._period, self._open_gpus = period_seconds, open_gpus
        self._whole, self._keep, self._deliver = whole, keep, deliver
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

    def sample(self, gpus: Gpus, now_seconds: float) -> Sample:
        """One look. A process's first look only starts its CPU clock."""
        ranks = {}
        for rank, beat in enumerate(self._beats()):
            if rank not in self._ranks or not beat.pid or beat.state is WorkerState.FINISHED:
                self._processes.pop(rank, None)
                continue
            told = {**self._of_process(rank, beat.pid), **gpus.read(rank - self._ranks.start)}
            if told:
                ranks[rank] = told
        second = max(0, int(now_seconds - self._created))
        return Sample(time_seconds=now_seconds, second=second, node=self._node, whole=self._whole(), ranks=ranks)

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
        gpus, pause = self._open_gpus(), min(_FIRST_SECONDS, self._period)
        while not self._stop.wait(pause):
            pause = self._period
            sample = self.sample(gpus, time.time())
            with contextlib.suppress(OSError):
                self._keep(sample)
            for point in sample.points() if self._deliver else []:
                try:
                    self._points.put_nowait(point)
                except queue.Full:
                    self.missed += 1
