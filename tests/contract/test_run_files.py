"""Spec, status, outcome, the run folder, process identities: what one process writes, another reads."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from sgpu.contract import atomic, process
from sgpu.contract.errors import InputError, SgpuError
from sgpu.contract.outcome import Outcome, read_outcome
from sgpu.contract.policies import CheckpointPolicy, RestartPolicy
from sgpu.contract.process import ProcessId
from sgpu.contract.rundir import RunDir, all_runs, find_run, runs_folder
from sgpu.contract.spec import RunSpec, Tracking, new_run_id, read_spec
from sgpu.contract.status import FINAL_STATES, Status, read_status


def _spec(run_id: str = "20261130-140501-train-3f9c2a") -> RunSpec:
    return RunSpec(
        id=run_id, name="train", created=12.5, backend="local", world_size=4, gpus_per_node=4, accelerator="cpu",
        seed=7, tracking=Tracking(uri="sqlite:////x/mlflow.db", experiment="e", parent_run_id="p"), python="python3",
        working_dir="/work", sys_path=("/a", "/b"), environment={"A": "1"},
        checkpoints=CheckpointPolicy(root="s3://b", every_steps=5, keep_best={"metric": "loss", "mode": "min"}),
        restarts=RestartPolicy(max_restarts=1, min_gpus=2), timeout_seconds=9.0, launcher={"pid": 1, "started": 2},
        on_launcher_exit="stop", parameters={"lr": "0.1"}, tags={"t": "u"},
    )  # fmt: skip


def _run(home: pathlib.Path, run_id: str) -> RunDir:
    run = RunDir(runs_folder(home) / run_id)
    run.create()
    _spec(run_id).write(run)
    return run


def test_spec_round_trip(home: pathlib.Path) -> None:
    run = _run(home, "20261130-140501-train-3f9c2a")
    assert read_spec(run) == _spec()


@pytest.mark.parametrize("version", [0, 2, None, "1"])
def test_a_spec_of_another_version_is_refused(home: pathlib.Path, version: object) -> None:
    run = _run(home, "r")
    value = json.loads(run.spec.read_text())
    value["version"] = version
    atomic.write_json(run.spec, value)
    with pytest.raises(SgpuError, match=f"has version {version!r}; this sgpu reads version 1"):
        read_spec(run)


def test_a_spec_with_more_fields_is_read_and_none_is_told(home: pathlib.Path) -> None:
    run = _run(home, "20261130-140501-train-3f9c2a")
    atomic.write_json(run.spec, {**json.loads(run.spec.read_text()), "of_a_later_minor_version": 1})
    assert read_spec(run) == _spec()
    with pytest.raises(SgpuError, match=r"no run at .*it has no spec.json"):
        read_spec(RunDir(home / "runs" / "none"))


def test_status_round_trip(home: pathlib.Path) -> None:
    run = _run(home, "r")
    assert read_status(run) is None
    status = Status(
        state="FAILED", updated=2.0, started=1.0, ended=2.0, generation=3, restarts=3, step=9, epoch=1, total_steps=10,
        failure={"kind": "exception", "rank": 1},
    )  # fmt: skip
    status.write(run)
    assert read_status(run) == status
    assert status.final
    assert {Status(state=state, updated=0).final for state in FINAL_STATES} == {True}  # type: ignore[arg-type]
    assert not Status(state="RESTARTING", updated=0).final
    atomic.write_json(run.status, {**json.loads(run.status.read_text()), "later": 1})
    assert read_status(run) == status


def test_outcome_round_trip(home: pathlib.Path) -> None:
    run = _run(home, "r")
    assert read_outcome(run, 2, 1) is None
    run.attempt(2, 1).mkdir(parents=True)
    outcome = Outcome(
        kind="exception", rank=1, generation=2, step=5, time=3.0, exception=b"\x80", exception_type="E", message="m",
        traceback="t", collateral=True, unrecoverable=True,
    )  # fmt: skip
    outcome.write(run)
    assert read_outcome(run, 2, 1) == outcome
    assert run.generations() == [2]


def test_a_run_folder_is_private(home: pathlib.Path) -> None:
    run = _run(home, "r")
    assert run.root.stat().st_mode & 0o777 == 0o700
    assert run.spec.stat().st_mode & 0o777 == 0o600


def test_runs_are_found_by_parts_of_their_id(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = ["20261130-140501-train-3f9c2a", "20261130-140502-train-aaaaaa", "20261201-000000-eval-bbbbbb"]
    for run_id in ids:
        _run(home, run_id)
    (runs_folder(home) / "20261202-000000-half-made").mkdir()  # its launcher died before it wrote the spec
    assert [run.id for run in all_runs(home)] == ids[::-1]
    assert find_run(home, "3f9c2a").id == ids[0]
    assert find_run(home, "20261201").id == ids[2]
    assert find_run(home, ids[1]).id == ids[1]
    assert find_run(home, str(runs_folder(home) / ids[1])).id == ids[1]
    monkeypatch.chdir(runs_folder(home))
    assert find_run(home, f"./{ids[1]}").root == runs_folder(home) / ids[1]
    with pytest.raises(InputError, match=r"could be any of .*give more of it"):
        find_run(home, "20261130")
    with pytest.raises(InputError, match=r"no run 'nope' in .*`sgpu runs` lists them"):
        find_run(home, "nope")
    with pytest.raises(InputError, match=r"it has no spec.json"):
        find_run(home, str(home / "elsewhere"))
    with pytest.raises(InputError):
        find_run(home, "")


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("train", "train"),
        ("my run/..\\x", "my-run----x"),
        ("", "run"),
        ("ÄÖ", "run"),
        ("x" * 99, "x" * 40),
        ("../", "run"),
    ],
)
def test_run_ids_are_safe_names_that_sort_by_time(name: str, slug: str) -> None:
    made = new_run_id(name, now=1796012856.0)
    assert made.startswith(f"20261130-042736-{slug}-")
    assert os.sep not in made
    assert made != new_run_id(name, now=1796012856.0)


def test_a_process_is_more_than_its_number(tmp_path: pathlib.Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = process.process_of(child.pid)
    assert known is not None
    assert known.alive()
    known.write(tmp_path / "p.json")
    assert process.read_process(tmp_path / "p.json") == known
    assert not ProcessId(pid=child.pid, started=known.started + 1).alive()
    assert not ProcessId(pid=child.pid, started=known.started + 1).signal(9)
    assert child.pid in process.descendants(os.getpid())
    assert process.parent_of(child.pid) == os.getpid()
    assert known.signal(9)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not known.alive(), "a zombie is not alive"
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    assert process.process_of(child.pid) is None
    assert process.read_process(tmp_path / "none.json") is None


_TREE = """
import os, subprocess, sys, time
from sgpu.contract.process import die_with_parent
me = os.getpid()
pid = os.fork()
if pid == 0:
    die_with_parent(me)
    print(os.getpid(), flush=True)
    time.sleep(600)
os.waitpid(pid, 0)
"""


def test_a_process_can_be_bound_to_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", _TREE], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as output:
        child = process.process_of(int(output.readline()))
        assert child is not None
        descriptor = os.pidfd_open(child.pid)
        parent.kill()
        parent.wait(10)
        import select

        ready, _, _ = select.select([descriptor], [], [], 10)
        os.close(descriptor)
    assert ready, "the child outlived its parent"
