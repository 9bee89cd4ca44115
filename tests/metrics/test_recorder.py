"""The worker's side: cheap, never waiting, never failing for the disk, and honest about what it lost."""

from __future__ import annotations

import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from sgpu.contract import failpoint, records
from sgpu.contract.errors import InputError
from sgpu.contract.rundir import RunDir
from sgpu.metrics import names, progress
from sgpu.metrics.progress import Position, Progress
from sgpu.metrics.recorder import Recorder

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: pathlib.Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


def lines(run: RunDir, rank: int = 0) -> list[dict[str, object]]:
    return records.read_all(run.spool(rank))


def steps(run: RunDir) -> list[object]:
    return [line["step"] for line in lines(run)]


def lost(run: RunDir) -> list[tuple[int, str]]:
    return [(e["count"], e["cause"]) for e in records.read_all(run.events) if e["kind"] == "metrics_lost"]


def test_a_line_says_when_where_and_what(run: RunDir) -> None:
    recorder = Recorder(run, rank=3, generation=2)
    recorder.log(7, {"loss": 0.5, "lr": 1})
    recorder.close()
    (line,) = lines(run, 3)
    assert abs(float(str(line.pop("time"))) - time.time()) < 60
    assert line == {"step": 7, "generation": 2, "values": {"loss": 0.5, "lr": 1.0}}
    assert run.spool(3).stat().st_mode & 0o077 == 0, "private"


@pytest.mark.parametrize(
    "value",
    [
        1,
        True,
        0.5,
        np.float32(0.5),
        np.int64(3),
        np.array(2.0),
        torch.tensor(0.25),
        torch.ones(()).bfloat16(),
    ],
)
def test_numbers_of_all_kinds(run: RunDir, value: object) -> None:
    recorder = Recorder(run, rank=0, generation=0)
    recorder.log(np.int64(1), {"x": value})  # type: ignore[arg-type, dict-item]
    recorder.close()
    assert lines(run)[0]["values"] == {"x": float(value)}  # type: ignore[arg-type]


def test_a_loss_that_still_has_its_graph(run: RunDir) -> None:
    recorder = Recorder(run, rank=0, generation=0)
    recorder.log(1, {"loss": (torch.ones(3, requires_grad=True) * 2).sum()})  # type: ignore[dict-item]
    recorder.close()
    assert lines(run)[0]["values"] == {"loss": 6.0}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_kept(run: RunDir, value: float) -> None:
    recorder = Recorder(run, rank=0, generation=0)
    recorder.log(1, {"x": value})
    recorder.close()
    found = lines(run)[0]["values"]["x"]  # type: ignore[index]
    assert found == value or (math.isnan(found) and math.isnan(value))


@pytest.mark.parametrize(
    "value",
    ["0.5", b"1", None, [1.0], {"a": 1}, 1j, torch.ones(2), torch.ones(1), np.ones((1, 1)), 10**400, object()],
)
def test_what_is_no_number_is_refused_by_its_name(run: RunDir, value: object) -> None:
    recorder = Recorder(run, rank=0, generation=0)
    with pytest.raises(InputError, match="metric 'accuracy' must be one number; found"):
        recorder.log(1, {"loss": 1.0, "accuracy": value})  # type: ignore[dict-item]
    recorder.close()
    assert not lines(run), "nothing of a refused call is recorded"


@pytest.mark.parametrize(
    "name",
    ["", "a" * 231, "loss?", "größe", "a//b", "/a", "a/", "a/../b", "goodput", "restarts", "rank1/loss", "system/x", 5],
)
def test_names_that_may_not_be_are_refused(run: RunDir, name: object) -> None:
    with pytest.raises(InputError, match=r"metric"):
        Recorder(run, rank=0, generation=0).log(1, {name: 1.0})  # type: ignore[dict-item]


@pytest.mark.parametrize("name", ["loss", "val/acc", "top-1.5 x", "fetch_seconds", "rank_loss", "a:b"])
def test_names_that_may_be(run: RunDir, name: str) -> None:
    Recorder(run, rank=0, generation=0).log(1, {name: 1.0})


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_steps_are_whole_numbers(run: RunDir, step: object) -> None:
    with pytest.raises(InputError, match="a metric's step must be"):
        Recorder(run, rank=0, generation=0).log(step, {"x": 1.0})  # type: ignore[arg-type]


def test_closed_is_closed(run: RunDir) -> None:
    recorder = Recorder(run, rank=0, generation=0)
    recorder.close()
    recorder.close()
    with pytest.raises(InputError, match="was closed"):
        recorder.log(1, {"x": 1.0})


def test_a_new_generation_goes_on_behind_a_torn_line(run: RunDir) -> None:
    run.spool(0).write_text('{"time": 1, "step": 1, "generation": 0, "values": {"x": 1.0}}\n{"time": 1, "st')
    recorder = Recorder(run, rank=0, generation=1)
    recorder.log(2, {"x": 2.0})
    recorder.log(3, {"x": 3.0})
    recorder.close()
    assert steps(run) == [1, 2, 3]


def test_a_full_disk_loses_counted_lines_and_nothing_else(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    fired = tmp_path / "fired"
    monkeypatch.setenv("SGPU_FAILPOINT", "metrics.flush#2=errno:ENOSPC;metrics.flush#3=errno:ENOSPC")
    monkeypatch.setenv("SGPU_FAILPOINT_LOG", str(fired))
    failpoint.reset()
    try:
        recorder = Recorder(run, rank=0, generation=0)
        for step in range(5):
            recorder.log(step, {"x": 1.0})
            recorder.flush()
        recorder.close()
    finally:
        monkeypatch.delenv("SGPU_FAILPOINT")
        failpoint.reset()
    assert len(fired.read_text().splitlines()) == 2, "the faults fired"
    told = lost(run)
    assert sum(count for count, _ in told) == 5 - len(steps(run))
    assert sum(count for count, _ in told) in (2, 3)
    assert "No space left" in told[0][1]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path: pathlib.Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no right to mount a tmpfs here")
    try:
        run = RunDir(disk / "run")
        run.create()
        recorder = Recorder(run, rank=0, generation=0)
        for step in range(3000):
            recorder.log(step, {"loss": 1.0})
        recorder.flush()
        kept = len(steps(run))
        assert 0 < kept < 3000, "the disk was full"
        freed = run.spool(0).read_bytes()
        run.spool(0).write_bytes(freed[: len(freed) // 2])  # somebody makes room, in the middle of a line
        recorder.log(3000, {"loss": 2.0})
        recorder.close()
        assert steps(run)[-1] == 3000
        counted = sum(count for count, _ in lost(run))
        assert counted == 3000 - kept or counted == 3000 - kept + 1, "a line may have been cut at its very end"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_limit_holds_and_is_told(run: RunDir) -> None:
    recorder = Recorder(run, rank=0, generation=0, limit_bytes=4096)
    for step in range(1000):
        recorder.log(step, {"loss": 1.0})
        recorder.flush()
    recorder.close()
    assert run.spool(0).stat().st_size <= 4096
    kept = steps(run)
    assert 0 < len(kept) < 1000
    assert kept == list(range(len(kept)))
    assert sum(count for count, _ in lost(run)) == 1000 - len(kept)
    assert "limit of 4096 bytes" in lost(run)[0][1]


def test_what_mlflow_has_makes_room(run: RunDir) -> None:
    recorder = Recorder(run, rank=0, generation=0, limit_bytes=4096)
    for step in range(30):
        recorder.log(step, {"loss": 1.0})
        recorder.flush()
    state = run.spool(0).stat()
    Progress(run_id="r", spools={0: Position(inode=state.st_ino, offset=state.st_size)}).write(run)
    for step in range(30, 60):
        recorder.log(step, {"loss": 1.0})
        recorder.flush()
    recorder.close()
    kept = steps(run)
    assert kept == list(range(30, 60)) or kept == list(range(kept[0], 60)), kept  # type: ignore[call-overload]
    assert run.spool(0).stat().st_ino != state.st_ino
    assert run.spool(0).stat().st_size <= 4096
    assert not lost(run)
    assert progress.read(run).spools[0].inode == state.st_ino


def test_a_killed_worker_leaves_whole_lines(run: RunDir) -> None:
    script = f"""
import pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from sgpu.contract.rundir import RunDir
from sgpu.metrics.recorder import Recorder
recorder = Recorder(RunDir(pathlib.Path({str(run.root)!r})), rank=0, generation=0)
for step in range(10**9):
    recorder.log(step, {{"loss": 0.5}})
"""
    worker = subprocess.Popen([sys.executable, "-c", script])
    deadline = time.monotonic() + 60
    while not (run.spool(0).exists() and run.spool(0).stat().st_size > 50_000):
        assert time.monotonic() < deadline
        assert worker.poll() is None
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    recorder = Recorder(run, rank=0, generation=1)
    recorder.log(10**9, {"loss": 0.5})
    recorder.close()
    found = steps(run)
    assert found[:-1] == list(range(len(found) - 1))
    assert found[-1] == 10**9


def test_it_costs_microseconds(run: RunDir) -> None:
    recorder, taken = Recorder(run, rank=0, generation=0), []
    values = {"loss": 0.5, "step_seconds": 0.1, "fetch_seconds": 0.01}
    for step in range(6400):
        began = time.perf_counter()
        recorder.log(step, values)
        taken.append(time.perf_counter() - began)
    recorder.close()
    rounds = [sum(taken[at : at + 64]) / 64 for at in range(0, 6400, 64)]  # each holds one write
    assert statistics.median(rounds) < 50e-6, "5 on a quiet machine; ten times that for a busy one"


def test_a_worker_that_records_loads_nothing_heavy() -> None:
    script = (
        "import sys, sgpu.metrics.recorder; "
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy', 'mlflow', 'psutil', 'requests'}))"
    )
    told = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert told.stdout.strip() == "[]"


def test_the_names_are_these() -> None:
    """A ratchet: a new name is a change of the public contract, made here too."""
    assert sorted(names.BUILT_IN) == [
        "cache_hits", "cache_misses", "checkpoint_blocked_seconds", "checkpoint_save_seconds", "checkpoint_size_bytes",
        "fetch_seconds", "goodput", "ledger/checkpoint_seconds", "ledger/data_seconds", "ledger/idle_seconds",
        "ledger/productive_seconds", "ledger/recomputing_seconds", "ledger/restarting_seconds",
        "ledger/restoring_seconds", "ledger/starting_seconds", "recomputed_steps", "recovery_seconds",
        "restarts", "restore_seconds", "step_seconds",
    ]  # fmt: skip
    assert sorted(names.SYSTEM) == [
        "cpu_percent", "gpu_celsius", "gpu_memory_bytes", "gpu_percent", "gpu_watts", "rss_bytes",
    ]  # fmt: skip
    assert sorted(names.NODE) == [
        "cpu_percent", "disk_bytes", "memory_bytes", "network_in_bytes_per_second", "network_out_bytes_per_second",
    ]  # fmt: skip
    documented = (ROOT / "docs" / "metrics.md").read_text()
    for name, told in [*names.BUILT_IN.items(), *names.SYSTEM.items(), *names.NODE.items()]:
        assert f"`{name}`" in documented or f"/{name}`" in documented, f"{name} is not in docs/metrics.md"
        assert told.meaning in documented, f"{name}: {told.meaning}"


def test_notes_that_are_not_whole_are_not_believed(run: RunDir) -> None:
    for text in (
        "",
        "{",
        "[]",
        '{"run_id": "x"}',
        '{"run_id": "x", "spools": {"a": {}}, "events_offset": 1, "marks": {}}',
    ):
        run.forwarder.write_text(text)
        assert progress.read(run) == Progress()
    kept = Progress(run_id="r", spools={1: Position(inode=5, offset=6)}, events_offset=7, marks={"a": 8})
    kept.write(run)
    assert progress.read(run) == kept
    assert json.loads(run.forwarder.read_text())["marks"] == {"a": 8}
