"""What nodes, processes and GPUs take, from the machine files as they grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from sgpu.contract import records
from sgpu.contract.rundir import RunDir
from sgpu.metrics import names
from sgpu.widgets.reading.series import Buffer
from sgpu.widgets.reading.snapshot import Series, Usage
from sgpu.widgets.words import number, size, whole

_MOST_POINTS = 240  # of one figure: there are many of them
_LABELS = {
    "cpu_percent": "CPU", "memory_bytes": "memory", "disk_bytes": "disk",
    "network_in_bytes_per_second": "network in", "network_out_bytes_per_second": "network out",
}  # fmt: skip
_RANK_LABELS = {
    "gpu_percent": "GPU busy", "gpu_memory_bytes": "GPU memory", "gpu_celsius": "GPU temperature",
    "gpu_watts": "GPU power", "cpu_percent": "CPU of the process", "rss_bytes": "memory of the process",
}  # fmt: skip
LABELS = (*_LABELS.values(), *_RANK_LABELS.values())
_TOTALS = {
    "memory_bytes": "memory_total_bytes", "disk_bytes": "disk_total_bytes",
    "gpu_memory_bytes": "gpu_memory_total_bytes",
}  # fmt: skip
_Key = tuple[int | None, str]  # rank and figure


def amount(value: float, unit: str) -> str:
    """97.3 and "%" -> "97 %"; 412.5 and "W" -> "412 W"; bytes in powers of 1000."""
    if unit.startswith("bytes"):
        return size(value) + unit.removeprefix("bytes")
    return f"{value:,.0f} {unit}" if abs(value) < 1e15 else f"{number(value)} {unit}"


@dataclass(kw_only=True)
class _Gauge:
    buffer: Buffer
    last: float = 0.0
    highest: float = 0.0
    total: float | None = None
    made: tuple[Series, Usage] | None = None


@dataclass(kw_only=True)
class _Node:
    """What was read of one machine file."""

    inode: int = 0
    offset: int = 0
    size_bytes: int = 0
    gauges: dict[_Key, _Gauge] = field(default_factory=dict)


class Usages:
    """Every node's figures. `refresh` reads what was appended since the last time."""

    def __init__(self, run: RunDir, nodes: int) -> None:
        self._run = run
        self._nodes = [_Node() for _ in range(nodes)]

    def refresh(self) -> None:
        for number_of_node in range(len(self._nodes)):
            self._read(number_of_node)

    def usage(self) -> tuple[Usage, ...]:
        """The same objects as long as nothing came."""
        return tuple(one for node in range(len(self._nodes)) for one in self._of(node))

    def _of(self, node: int) -> Iterator[Usage]:
        gauges = self._nodes[node].gauges
        ranks = sorted({rank for rank, _ in gauges if rank is not None})
        for rank in (None, *ranks):
            for figure, label in (_LABELS if rank is None else _RANK_LABELS).items():
                gauge = gauges.get((rank, figure))
                if gauge is not None:
                    yield _usage(node, rank, figure, label, gauge)

    def _read(self, node: int) -> None:
        path, known = self._run.machine(node), self._nodes[node]
        try:
            found = path.stat()
        except FileNotFoundError:
            return
        if (found.st_ino, found.st_size) == (known.inode, known.size_bytes):
            return
        if found.st_ino != known.inode or found.st_size < known.offset:  # written anew, thinned
            known = self._nodes[node] = _Node(inode=found.st_ino)
        for line in records.read_from(path, known.offset):
            known.offset = line.next_offset
            _take(known, line.record)
        known.size_bytes = found.st_size


def _take(node: _Node, record: dict[str, object]) -> None:
    second, ranks = whole(record.get("second")), record.get("ranks")
    if second is None:
        return
    _put(node, None, second, record.get("node"))
    for rank, told in (ranks if isinstance(ranks, dict) else {}).items():
        if str(rank).isdecimal():
            _put(node, int(rank), second, told)


def _put(node: _Node, rank: int | None, second: int, told: object) -> None:
    if not isinstance(told, dict):
        return
    for figure in _LABELS if rank is None else _RANK_LABELS:
        value = told.get(figure)
        if not isinstance(value, float):  # all are written as such
            continue
        gauge = node.gauges.get((rank, figure))
        if gauge is None:
            gauge = node.gauges[rank, figure] = _Gauge(
                buffer=Buffer(figure, rank or 0, most_points=_MOST_POINTS), highest=value
            )
        gauge.buffer.put(second, value)
        total = told.get(_TOTALS.get(figure, ""))
        gauge.last, gauge.highest = value, max(gauge.highest, value)
        gauge.total = total if isinstance(total, float) else None


def _usage(node: int, rank: int | None, figure: str, label: str, gauge: _Gauge) -> Usage:
    series = gauge.buffer.series()
    if gauge.made is None or gauge.made[0] is not series:
        unit = (names.NODE if rank is None else names.SYSTEM)[figure].unit
        of = f" of {amount(gauge.total, unit)}" if gauge.total else ""
        gauge.made = (
            series,
            Usage(
                node=node, rank=rank, figure=figure, label=label, unit=unit, series=series,
                now=amount(gauge.last, unit) + of, highest=amount(gauge.highest, unit),
            ),
        )  # fmt: skip
    return gauge.made[1]
