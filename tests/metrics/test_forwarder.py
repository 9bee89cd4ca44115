"""The real forwarder process against real MLflow: nothing lost, nothing twice, the right status, whatever dies."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from sgpu.contract.forwarding import NO_MLFLOW
from sgpu.contract.heartbeat import Category
from sgpu.contract.process import ProcessId
from sgpu.metrics import mlflow_reader, names

from .conftest import HandMadeRun, MakeRun, MlflowServer, Proxy, wait_for

STEPS = list(range(1, 21))


def test_a_run_is_told_whole(make_run: MakeRun, server: MlflowServer) -> None:
    run = make_run(server.url, experiment="cats")
    run.generation(0, range(1, 21))
    run.event("checkpoint_committed", step=10, blocked_seconds=0.25, save_seconds=1.5, size_bytes=1000, path="x")
    run.event("checkpoint_committed", step=20, blocked_seconds=0.5, save_seconds=2.5, size_bytes=1000, path="y")
    run.finish()
    run.forward_to_end()

    held = run.held()
    assert held.info.status == "FINISHED"
    assert held.info.run_name == "train"
    assert held.data.params == {"lr": "0.001", "world_size": "2", "seed": "7"}
    tags = held.data.tags
    assert tags["sgpu.run_id"] == run.dir.id
    assert tags["team"] == "vision"
    assert tags["sgpu.world_size"] == "2"
    assert tags["sgpu.version.torch"]
    assert len(tags["mlflow.source.git.commit"]) == 40
    assert tags["sgpu.state"] == "SUCCEEDED"
    assert float(tags["sgpu.seconds.productive"]) > 0
    assert run.raw_steps("loss") == run.raw_steps("rank1/loss") == run.raw_steps("step_seconds") == STEPS
    assert run.values("loss") == {step: float(step) for step in STEPS}
    assert run.values("rank1/loss") == {step: step + 0.1 for step in STEPS}
    assert run.values("checkpoint_blocked_seconds") == {10: 0.25, 20: 0.5}
    assert run.values("checkpoint_save_seconds") == {10: 1.5, 20: 2.5}
    assert run.values("restarts") == {0: 0.0}
    goodput = run.values("goodput")
    assert list(goodput) == [20]
    assert 0 < goodput[20] <= 1
    parts = {name: run.values(names.for_ledger(name))[20] for name in (each.name.lower() for each in Category)}
    assert len(parts) == 8
    assert parts["productive"] / sum(parts.values()) == pytest.approx(goodput[20], abs=1e-6)
    assert parts["productive"] == pytest.approx(float(tags["sgpu.seconds.productive"]), abs=2e-3)
    assert run.artifacts() == ["events.jsonl", "logs/rank0.txt"]
    assert not run.events("metrics_lost")

    link = run.link
    assert link.url == f"{server.url}/#/experiments/{link.experiment_id}/runs/{link.run_id}"
    assert link.open_command is None
    assert mlflow_reader.latest(run.uri, link.run_id)["loss"] == 20.0


def test_steps_done_again_after_a_restart_appear_once(make_run: MakeRun) -> None:
    run = make_run()
    run.supervised()
    run.status("RUNNING")
    process = run.forward()
    run.generation(0, range(1, 18))
    wait_for(lambda: run.dir.mlflow.exists() and run.dir.forwarder.exists(), "the first generation delivered")
    run.event("restored", generation=1, rank=0, step=10, seconds=0.5, source="volume", path="x")
    run.generation(1, range(11, 21), sign=-1.0)
    run.event("resumed", generation=1, from_step=10, recomputed_steps=7, seconds=1.25)
    run.finish()
    assert process.wait(60) == 0, run.log()
    assert run.raw_steps("loss") == run.raw_steps("rank1/loss") == STEPS
    values = run.values("loss")
    assert values[17] == 17.0, "the first value of a step stays"
    assert values[18] == -18.0, "steps that are new go on"
    assert run.values("restarts") == {0: 0.0, 1: 1.0}
    assert run.values("restore_seconds") == {1: 0.5}
    assert run.values("recovery_seconds") == {1: 1.25}
    assert run.values("recomputed_steps") == {1: 7.0}


def test_resuming_a_failed_run_continues_the_same_one(make_run: MakeRun, server: MlflowServer) -> None:
    run = make_run(server.url)
    run.generation(0, range(1, 11))
    failure = {"kind": "exception", "rank": 1, "step": 10, "message": "ValueError: loss is nan", "traceback": ""}
    run.finish("FAILED", failure=failure)
    run.forward_to_end()
    first = run.held()
    assert first.info.status == "FAILED"
    assert first.data.tags["sgpu.failure"] == "ValueError: loss is nan"

    run.supervised()
    run.status("STARTING")
    process = run.forward()
    wait_for(lambda: run.held().info.status == "RUNNING", "shown as running again")
    run.generation(1, range(6, 21), sign=-1.0)
    run.finish("SUCCEEDED")
    assert process.wait(60) == 0, run.log()
    assert run.held().info.run_id == first.info.run_id
    assert run.held().info.status == "FINISHED"
    assert run.raw_steps("loss") == STEPS
    assert run.held().data.params == first.data.params


def test_killed_between_writing_and_noting_it_nothing_is_lost_or_twice(
    make_run: MakeRun, server: MlflowServer, tmp_path: pathlib.Path
) -> None:
    run = make_run(server.url)
    fired = tmp_path / "fired"
    faults = {"SGPU_FAILPOINT": "metrics.batch_written#2=kill", "SGPU_FAILPOINT_LOG": str(fired)}
    run.supervised()
    run.status("RUNNING")
    run.generation(0, range(1, 11))
    process = run.forward(**faults)
    wait_for(run.dir.forwarder.exists, "the first chunk noted")
    run.generation(1, range(11, 21))
    assert process.wait(60) == -signal.SIGKILL, run.log()
    assert "metrics.batch_written" in fired.read_text(), "the fault fired"
    run.finish()
    run.forward_to_end()
    assert run.raw_steps("loss") == run.raw_steps("rank1/loss") == STEPS
    assert run.raw_steps("goodput") in ([20], [10, 20])


@pytest.mark.parametrize("trouble", ["503", "swallow"])
def test_a_server_that_comes_back_gets_everything_in_order(make_run: MakeRun, proxy: Proxy, trouble: str) -> None:
    run = make_run(proxy.url)
    run.supervised()
    run.status("RUNNING")
    process = run.forward(MLFLOW_HTTP_REQUEST_TIMEOUT="1")
    run.generation(0, range(1, 6))
    wait_for(run.dir.forwarder.exists, "the first steps delivered")
    proxy.set(trouble)
    run.generation(1, range(6, 11))
    wait_for(lambda: proxy.turned_away >= 2, "the forwarder met the trouble")
    proxy.set("up")
    run.generation(2, range(11, 21))
    run.finish()
    assert process.wait(60) == 0, run.log()
    assert "trying again" in run.log()
    assert run.raw_steps("loss") == STEPS
    assert run.held().info.status == "FINISHED"
    assert not run.events("metrics_lost")


def test_a_server_that_stays_away_costs_a_bounded_wait_and_is_told(make_run: MakeRun, proxy: Proxy) -> None:
    proxy.set("swallow")
    run = make_run(proxy.url)
    run.generation(0, range(1, 21))
    run.finish()
    process = run.forward("--drain-seconds", "3", MLFLOW_HTTP_REQUEST_TIMEOUT="100")
    wait_for(lambda: proxy.turned_away, "the forwarder asks")
    began = time.monotonic()
    assert process.wait(60) == 1
    assert time.monotonic() - began < 25, "the call that hangs is interrupted"
    (lost,) = run.events("metrics_lost")
    per_rank = 2 * len(STEPS)
    assert lost["count"] == 2 * per_rank + 1 + 9, "both ranks' two metrics, restarts, goodput and the ledger"
    assert "MLflow" in lost["cause"]


def test_without_mlflow_that_is_told_once(make_run: MakeRun, tmp_path: pathlib.Path) -> None:
    (tmp_path / "mlflow.py").write_text("raise ImportError('there is none')\n")
    run = make_run("")
    assert run.forward(PYTHONPATH=str(tmp_path)).wait(60) == NO_MLFLOW
    (warning,) = run.events("warning")
    assert warning["message"].startswith("metrics stay in the run folder")
    assert "there is none" in warning["message"]


def test_sigterm_brings_what_is_there_and_waits_for_no_period(make_run: MakeRun, server: MlflowServer) -> None:
    run = make_run(server.url)
    run.supervised()
    run.status("RUNNING")
    process = run.forward("--period-seconds", "30")
    wait_for(run.dir.mlflow.exists, "the run made")
    run.generation(0, range(1, 21))
    began = time.monotonic()
    process.terminate()
    assert process.wait(30) == 0, run.log()
    assert time.monotonic() - began < 25, "its period is 30 s"
    assert run.raw_steps("loss") == STEPS
    assert run.held().info.status == "RUNNING", "the run itself has not ended"


def test_a_vanished_supervisor_is_shown_as_a_failure(make_run: MakeRun, server: MlflowServer) -> None:
    run = make_run(server.url)
    supervisor = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        ProcessId(pid=supervisor.pid, started=0).write(run.dir.agent)  # not a process that runs now
        run.status("RUNNING")
        process = run.forward(parent_pid=supervisor.pid)
        wait_for(run.dir.mlflow.exists, "the run made")
        assert process.poll() is None
        run.generation(0, range(1, 21))
    finally:
        supervisor.kill()
        supervisor.wait()
    assert process.wait(60) == 0, run.log()
    held = run.held()
    assert held.info.status == "FAILED"
    assert "supervisor vanished" in held.data.tags["sgpu.failure"]
    assert run.raw_steps("loss") == STEPS


def test_two_forwarders_of_one_run_take_turns(make_run: MakeRun, server: MlflowServer) -> None:
    run = make_run(server.url)
    run.generation(0, range(1, 21))
    run.finish()
    first, second = run.forward(), run.forward()
    assert first.wait(60) == 0, run.log()
    assert second.wait(60) == 0, run.log()
    assert run.raw_steps("loss") == STEPS
    from mlflow.tracking import MlflowClient

    found = MlflowClient(run.uri).search_runs(
        [run.link.experiment_id], filter_string=f"tags.`sgpu.run_id` = '{run.dir.id}'"
    )
    assert len(found) == 1


def test_two_runs_at_once_on_a_fresh_home(home: pathlib.Path, make_run: MakeRun) -> None:
    home.mkdir()
    uri = mlflow_reader.default_tracking(home)
    runs: list[HandMadeRun] = [make_run(uri), make_run(uri)]
    processes = []
    for run in runs:
        run.generation(0, range(1, 21))
        run.finish()
        processes.append(run.forward())
    for run, process in zip(runs, processes, strict=True):
        assert process.wait(90) == 0, run.log()
        assert run.raw_steps("loss") == STEPS
        assert run.held().info.status == "FINISHED"
        assert run.artifacts() == ["events.jsonl", "logs/rank0.txt"]
        assert run.link.url is None
        assert run.link.open_command == f"mlflow ui --backend-store-uri {uri}"
    assert runs[0].link.experiment_id == runs[1].link.experiment_id
    assert sorted(os.listdir(home)) == ["mlartifacts", "mlflow.db", "mlflow.db.lock", "runs"]


def test_machine_figures_of_each_rank(make_run: MakeRun, server: MlflowServer) -> None:
    run = make_run(server.url)
    run.supervised()
    run.status("RUNNING")
    run.generation(0, range(1, 21))
    process = run.forward("--sample-seconds", "1")
    wait_for(lambda: run.dir.mlflow.exists() and "system/rank1/cpu_percent" in run.held().data.metrics, "samples")
    run.finish()
    assert process.wait(60) == 0, run.log()
    for rank in range(2):
        memory = run.values(f"system/rank{rank}/rss_bytes")
        assert all(2**20 < value < 2**36 for value in memory.values())
        steps = run.raw_steps(f"system/rank{rank}/cpu_percent")
        assert steps == sorted(set(steps))
