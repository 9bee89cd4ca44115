"""What a machine takes as a whole, and how the run folder remembers it."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections import namedtuple
from types import SimpleNamespace

import psutil
import pytest

from sgpu.contract import records
from sgpu.contract.heartbeat import Page
from sgpu.contract.spec import read_spec
from sgpu.metrics import names, node
from sgpu.metrics.machine import Sample
from sgpu.metrics.node import Journal, NodeFigures, watch_node

from .conftest import MakeRun, wait_for

Link = namedtuple("Link", "bytes_recv bytes_sent")
TOTALS = {"memory_total_bytes", "disk_total_bytes"}


def test_figures_of_this_machine(tmp_path: pathlib.Path) -> None:
    figures = NodeFigures(tmp_path)
    first = figures()
    told = figures()
    assert set(told) == {*names.NODE, *TOTALS}
    assert set(first) == {name for name in told if not name.startswith("network")}, "a rate needs two looks"
    assert 0 <= told["cpu_percent"] <= 100
    assert 0 < told["memory_bytes"] < told["memory_total_bytes"] == psutil.virtual_memory().total
    assert 0 < told["disk_bytes"] <= told["disk_total_bytes"]


def test_the_network_is_a_rate_of_all_links_but_loopback(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter([(100.0, 1000, 50), (105.0, 6000, 60), (110.0, 0, 0)])
    now: list[tuple[float, int, int]] = []
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: now[-1][0]))
    monkeypatch.setattr(
        psutil, "net_io_counters",
        lambda pernic: {"lo": Link(10**9, 10**9), "eth0": Link(now[-1][1], now[-1][2]), "ib0": Link(now[-1][1], 0)},
    )  # fmt: skip
    figures = NodeFigures(tmp_path)
    told = []
    for look in seen:
        now.append(look)
        told.append({name: value for name, value in figures().items() if name.startswith("network")})
    assert told[0] == {}
    assert told[1] == {"network_in_bytes_per_second": 2000.0, "network_out_bytes_per_second": 2.0}
    assert set(told[2].values()) == {0.0}, "counters that began anew are no negative rate"


def test_a_volume_that_went_away_leaves_the_rest(tmp_path: pathlib.Path) -> None:
    assert "disk_bytes" not in (told := NodeFigures(tmp_path / "gone")())
    assert "memory_bytes" in told


def _sample(second: int) -> Sample:
    return Sample(time_seconds=float(second), second=second, node=0, whole={"cpu_percent": 1.0})


def test_of_a_long_run_fewer_samples_stay_evenly(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "machine.jsonl"
    journal = Journal(path, most_lines=10)
    for second in range(100):
        journal.keep(_sample(second))
    kept = [record["second"] for record in records.read_all(path)]
    assert 5 <= len(kept) <= 10
    assert kept[0] == 0
    assert len({after - before for before, after in itertools.pairwise(kept)}) <= 2
    assert kept[-1] >= 84
    Journal(path, most_lines=10).keep(_sample(1000))
    assert [record["second"] for record in records.read_all(path)] == [*kept, 1000], "another process goes on"


def test_another_nodes_figures_lie_in_its_folder(make_run: MakeRun) -> None:
    run = make_run("sqlite://", world_size=2).dir
    spec = dataclasses.replace(read_spec(run), gpus_per_node=1)
    folder = run.node(1)
    folder.root.mkdir(parents=True)
    page = Page.create(folder.heartbeat, 2)
    page.slot(1).start(0)
    sampler = watch_node(run, spec, 1, page.beats, environment={}, period_seconds=0.01, deliver=False)
    sampler.start()
    try:
        wait_for(lambda: len(records.read_all(folder.root / "machine.jsonl")) > 2, "samples")
    finally:
        sampler.stop(30)
    page.close()
    assert not run.machine(0).exists()
    told = records.read_all(run.machine(1))[-1]
    assert set(told["node"]) == {*names.NODE, *TOTALS}
    assert {rank: set(figures) for rank, figures in told["ranks"].items()} == {"1": {"cpu_percent", "rss_bytes"}}
    assert sampler.take(10) == [], "nobody asks a node that is not the first for points"
