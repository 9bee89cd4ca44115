"""Simulated nodes of this machine: how workers and GPUs are dealt out, and what is started."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import pytest

from sgpu import Local, distributed, settings
from sgpu.contract.errors import InputError
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import RunSpec
from sgpu.launch import local, plan
from sgpu.launch.plan import Machine


def _train() -> None: ...


def _spec(gpus: int | None, nodes: int) -> RunSpec:
    return distributed(gpus=gpus, on=Local(nodes=nodes))(_train).plan().spec


@pytest.mark.parametrize(
    ("gpus", "nodes", "per_node"), [(4, 2, 2), (2, 2, 1), (6, 3, 2), (None, 3, 1), (None, 1, 1), (3, 1, 3)]
)
def test_workers_are_dealt_out_evenly(gpus: int | None, nodes: int, per_node: int) -> None:
    spec = _spec(gpus, nodes)
    assert (spec.world_size, spec.gpus_per_node, spec.nodes) == (per_node * nodes, per_node, nodes)
    assert [rank for node in range(nodes) for rank in spec.ranks_of(node)] == list(range(spec.world_size))
    assert {len(spec.ranks_of(node)) for node in range(nodes)} == {per_node}


@pytest.mark.parametrize(
    ("gpus", "nodes", "advice"), [(3, 2, "gpus=4 or gpus=2"), (1, 2, "gpus=2"), (7, 3, "gpus=9 or gpus=6")]
)
def test_workers_that_cannot_be_dealt_out_are_refused(gpus: int, nodes: int, advice: str, home: pathlib.Path) -> None:
    with pytest.raises(InputError, match=f"{gpus} workers on {nodes} nodes.*ask for {advice}$"):
        distributed(gpus=gpus, on=Local(nodes=nodes))(_train).submit()
    assert not home.exists() or os.listdir(home) == []


def test_all_gpus_of_a_machine_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InputError, match="7 workers on 2 nodes"):
        plan.world_size(None, Machine(gpus=7, nodes=2))
    assert plan.world_size(None, Machine(gpus=8, nodes=2)) == 8


def test_a_run_shrinks_to_no_more_than_it_has() -> None:
    assert plan.world_size(4, Machine(gpus=0, nodes=2), 4) == 4
    with pytest.raises(InputError, match="min_gpus=6 is more than the run has: 4"):
        plan.world_size(4, Machine(gpus=0, nodes=2), 6)


def test_each_node_has_its_own_agent_address_and_gpus(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, run, back_end = _spec(4, 2), RunDir(tmp_path / "run"), Local(nodes=2)
    commands = [back_end.command(spec, run, node) for node in range(2)]
    assert [command[1:4] for command in commands] == [["-m", "sgpu.agent", str(run.root)]] * 2
    assert [command[4:] for command in commands] == [
        ["--node", "0", "--address", "127.0.0.2"], ["--node", "1", "--address", "127.0.0.3"],
    ]  # fmt: skip
    on_gpus = dataclasses.replace(spec, accelerator="cuda")
    monkeypatch.setattr(settings, "device_names", lambda: ["nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl"])
    assert [back_end.command(on_gpus, run, node)[-2:] for node in range(2)] == [["--gpus", "0,1"], ["--gpus", "2,3"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    assert [back_end.command(on_gpus, run, node)[-1] for node in range(2)] == ["7,5", "3,1"]


def test_spares_come_after_the_nodes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = distributed(gpus=4, on=Local(nodes=2, spares=1))(_train).plan().spec
    assert (spec.world_size, spec.nodes, spec.spares, list(spec.ranks_of(2))) == (4, 2, 1, [])
    command = Local(nodes=2, spares=1).command(spec, RunDir(tmp_path / "run"), 2)
    assert command[4:] == ["--node", "2", "--address", "127.0.0.4"]
    monkeypatch.setattr(settings, "device_names", lambda: ["nvidia0", "nvidia1"])
    with pytest.raises(InputError, match="would need GPUs of its own; use spares=0"):
        distributed(on=Local(nodes=2, spares=1))(_train).plan()


def test_a_run_on_one_node_is_started_as_ever(tmp_path: pathlib.Path) -> None:
    spec, run = _spec(3, 1), RunDir(tmp_path / "run")
    assert Local().command(spec, run)[1:] == ["-m", "sgpu.agent", str(run.root)]
    assert local.Local(nodes=1) == Local()


def test_a_plan_tells_the_nodes() -> None:
    assert "4 CPU worker(s) on 2 nodes on local" in str(distributed(gpus=4, on=Local(nodes=2))(_train).plan())
