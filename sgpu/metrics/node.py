"""What a machine as a whole takes, and the file of the run folder that remembers it."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Mapping

import psutil

from sgpu.contract import atomic, records
from sgpu.contract.heartbeat import Beat
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.metrics.gpus import NoGpus, find_gpus
from sgpu.metrics.machine import Sample, Sampler

SAMPLE_SECONDS = 5.0
_MOST_LINES = 2000  # of a machine file: beyond, every other one goes


class NodeFigures:
    """Figures by names of `names.NODE`, and what is there in all: `memory_total_bytes`, `disk_total_bytes`.

    Args:
        folder: its disk counts.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        psutil.cpu_percent(None)  # its clock starts
        self._seen: tuple[float, int, int] | None = None

    def __call__(self) -> dict[str, float]:
        memory = psutil.virtual_memory()
        told = {
            "cpu_percent": psutil.cpu_percent(None),
            "memory_bytes": float(memory.total - memory.available),
            "memory_total_bytes": float(memory.total),
        }
        try:
            disk = psutil.disk_usage(str(self._folder))
        except OSError:  # a volume that went away
            return told | self._network()
        return told | {"disk_bytes": float(disk.used), "disk_total_bytes": float(disk.total)} | self._network()

    def _network(self) -> dict[str, float]:
        """Nothing at the first look."""
        links = [told for name, told in psutil.net_io_counters(pernic=True).items() if not name.startswith("lo")]
        now = (time.monotonic(), sum(link.bytes_recv for link in links), sum(link.bytes_sent for link in links))
        before, self._seen = self._seen, now
        if before is None or now[0] <= before[0]:
            return {}
        return {
            name: max(0.0, (now[at] - before[at]) / (now[0] - before[0]))
            for at, name in ((1, "network_in_bytes_per_second"), (2, "network_out_bytes_per_second"))
        }


class Journal:
    """Samples of one node in its machine file: of a long run fewer, evenly."""

    def __init__(self, path: pathlib.Path, *, most_lines: int = _MOST_LINES) -> None:
        self._path, self._most_lines = path, most_lines
        self._lines = sum(1 for _ in records.read_from(path))
        self._every = self._passed = 1

    def keep(self, sample: Sample) -> None:
        """
        Raises:
            OSError: the disk is full.
        """
        if self._passed % self._every == 0:
            records.append(self._path, sample.record())
            self._lines += 1
        self._passed += 1
        if self._lines > self._most_lines:
            self._halve()

    def _halve(self) -> None:
        kept = self._path.read_bytes().splitlines(keepends=True)[::2]
        atomic.write_bytes(self._path, b"".join(kept), durable=False)
        self._lines, self._every = len(kept), 2 * self._every


def watch_node(
    run: RunDir,
    spec: RunSpec,
    node: int,
    beats: Callable[[], list[Beat]],
    *,
    environment: Mapping[str, str],
    period_seconds: float = SAMPLE_SECONDS,
    deliver: bool = True,
) -> Sampler:
    """What samples a node of a run into its machine file; to be started.

    Args:
        environment: the workers'; its CUDA_VISIBLE_DEVICES says which GPUs are theirs.
        deliver: whether points are to be taken from it for MLflow.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    return Sampler(
        beats, ranks=spec.ranks_of(node), created_seconds=spec.created, period_seconds=period_seconds,
        open_gpus=(lambda: find_gpus(visible)) if spec.accelerator == "cuda" else NoGpus,
        node=node, whole=NodeFigures(run.root), keep=Journal(run.machine(node)).keep, deliver=deliver,
    )  # fmt: skip
