"""What machines take: read as it grows, thinned, told by node; as words, HTML and messages."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from sgpu.contract import atomic, records
from sgpu.contract.spec import read_spec
from sgpu.widgets.reading.feed import Feed
from sgpu.widgets.reading.usage import Usages, amount
from sgpu.widgets.showing import html
from sgpu.widgets.showing.messages import Messages, head_of
from sgpu.widgets.showing.text import render

WHOLE = {
    "cpu_percent": 93.4, "memory_bytes": 3.1e9, "memory_total_bytes": 8e9, "disk_bytes": 2e10,
    "disk_total_bytes": 1e11, "network_in_bytes_per_second": 1.2e6, "network_out_bytes_per_second": 300.0,
}  # fmt: skip
GPU = {
    "gpu_percent": 97.0, "gpu_memory_bytes": 61e9, "gpu_memory_total_bytes": 80e9, "gpu_celsius": 68.0,
    "gpu_watts": 412.5, "cpu_percent": 101.0, "rss_bytes": 2.1e9,
}  # fmt: skip


def tell(run: Any, second: int, node: int = 0, *, whole: Any = WHOLE, ranks: Any = None) -> None:
    path = run.dir.machine(node)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"time": run.created + second, "second": second, "node": whole, "ranks": ranks or {}}
    records.append(path, record)


@pytest.fixture
def two_nodes(run: Any) -> Any:
    """A run with a rank on each of two nodes; the second has a GPU."""
    dataclasses.replace(read_spec(run.dir), gpus_per_node=1).write(run.dir)
    tell(run, 5, ranks={"0": {"cpu_percent": 50.0, "rss_bytes": 1e9}})
    tell(run, 10, whole={**WHOLE, "cpu_percent": 12.0}, ranks={"0": {"cpu_percent": 40.0, "rss_bytes": 1e9}})
    tell(run, 5, 1, ranks={"1": GPU})
    return run


def test_each_node_is_told_in_a_line_and_each_rank(two_nodes: Any, clock: Any) -> None:
    lines = render(Feed(two_nodes.dir, clock=clock).snapshot()).splitlines()
    at = lines.index("machines:")
    assert lines[at + 1 : at + 5] == [
        "  node 0: CPU 12 %, memory 3.1 GB of 8.0 GB, disk 20.0 GB of 100 GB, network in 1.2 MB/s, network out 300 B/s",
        "    rank 0: CPU of the process 40 %, memory of the process 1.0 GB",
        "  node 1: CPU 93 %, memory 3.1 GB of 8.0 GB, disk 20.0 GB of 100 GB, network in 1.2 MB/s, network out 300 B/s",
        "    rank 1: GPU busy 97 %, GPU memory 61.0 GB of 80.0 GB, GPU temperature 68 °C, GPU power 412 W, "
        "CPU of the process 101 %, memory of the process 2.1 GB",
    ]


def test_an_ended_run_keeps_the_last_and_the_highest(two_nodes: Any, clock: Any) -> None:
    two_nodes.status("SUCCEEDED", ended=two_nodes.created + 60)
    snapshot = Feed(two_nodes.dir, clock=clock).snapshot()
    assert "machines, at the last look:" in render(snapshot)
    page = html.page(snapshot)
    assert "<tr><th>node</th><th>CPU</th><th>memory</th>" in page
    assert "<tr><td>0</td><td>12 %<br>93 %</td><td>3.1 GB of 8.0 GB<br>3.1 GB</td>" in page
    assert "<tr><td>0</td><td></td><td></td><td></td><td></td><td>40 %<br>50 %</td>" in page, "rank 0 has no GPU"
    assert "<tr><td>1</td><td>97 %<br>97 %</td>" in page


def test_of_many_ranks_the_first_are_told(run: Any, clock: Any) -> None:
    tell(run, 1, ranks={str(rank): {"rss_bytes": 1e9} for rank in range(500)})
    snapshot = Feed(run.dir, clock=clock).snapshot()
    assert "  … and 477 more lines" in render(snapshot)
    assert "and 450 more ranks" in html.page(snapshot)


def test_a_browser_gets_the_node_that_it_watches_and_then_what_is_new(two_nodes: Any, clock: Any) -> None:
    feed, messages = Feed(two_nodes.dir, clock=clock), Messages()
    first = messages.message(feed.snapshot())
    assert first is not None
    assert first["head"]["usage_nodes"] == [0, 1]
    told = {one["name"]: one for one in first["usage"]}
    assert {"node/cpu_percent", "0/cpu_percent"} < set(told)
    assert not any(name.startswith("1/") for name in told)
    cpu = told["node/cpu_percent"]
    assert (cpu["steps"], cpu["values"], cpu["keep"]) == ([5, 10], [93.4, 12.0], 0)
    assert (cpu["label"], cpu["unit"], cpu["now"], cpu["highest"]) == ("CPU", "%", "12 %", "93 %")
    tell(two_nodes, 15)
    clock.now += 10
    again = messages.message(feed.snapshot())
    assert again is not None
    cpu = next(one for one in again["usage"] if one["name"] == "node/cpu_percent")
    assert (cpu["keep"], cpu["steps"]) == (2, [15])
    messages.usage_node = 1
    other = messages.message(feed.snapshot(), full=True)
    assert other is not None
    assert {"node/disk_bytes", "1/gpu_watts"} < {one["name"] for one in other["usage"]}


def test_a_file_that_was_thinned_is_read_anew(run: Any) -> None:
    usages = Usages(run.dir, 1)
    for second in range(10):
        tell(run, second)
    usages.refresh()
    before = usages.usage()
    usages.refresh()
    assert all(a is b for a, b in zip(before, usages.usage(), strict=True)), "nothing new is the same"
    lines = run.dir.machine(0).read_bytes().splitlines(keepends=True)
    atomic.write_bytes(run.dir.machine(0), b"".join(lines[::2]), durable=False)
    tell(run, 10)
    usages.refresh()
    assert usages.usage()[0].series.steps == (0, 2, 4, 6, 8, 10)


def test_a_long_run_is_thinned_and_keeps_its_peak(run: Any) -> None:
    for second in range(1500):
        tell(run, second, whole={"cpu_percent": 100.0 if second == 777 else 10.0})
    usages = Usages(run.dir, 1)
    usages.refresh()
    (cpu,) = usages.usage()
    assert len(cpu.series.steps) <= 240
    assert (cpu.series.steps[0], cpu.series.steps[-1], cpu.highest) == (0, 1499, "100 %")
    assert 100.0 in cpu.series.values


@pytest.mark.parametrize("line", ["[]", "{}", '{"second": 1}', '{"second": 1, "node": [], "ranks": {"x": 1, "0": 3}}',
    '{"second": 1, "node": {"cpu_percent": "<b>"}, "ranks": []}', '{"second": 1e400, "node": {"cpu_percent": 1.0}}',
])  # fmt: skip
def test_what_is_no_figure_is_passed_over(run: Any, clock: Any, line: str) -> None:
    run.dir.machine(0).write_text(line + "\n")
    snapshot = Feed(run.dir, clock=clock).snapshot()
    assert snapshot.usage == ()
    assert head_of(snapshot)["usage_nodes"] == []
    tell(run, 2)
    usages = Usages(run.dir, 1)
    usages.refresh()
    assert usages.usage()[0].now == "93 %"


def test_amounts_in_words() -> None:
    assert [amount(97.4, "%"), amount(1.2e6, "bytes/s"), amount(6e10, "bytes"), amount(412.5, "W")] == [
        "97 %", "1.2 MB/s", "60.0 GB", "412 W",
    ]  # fmt: skip
    assert amount(math.nan, "W") == "NaN W"
