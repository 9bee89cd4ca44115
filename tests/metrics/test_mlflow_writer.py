"""One MLflow run through the writer and the delivery, in this process, against the real server."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from sgpu.contract.errors import SgpuError
from sgpu.contract.spec import read_spec
from sgpu.metrics import facts, mlflow_reader, progress
from sgpu.metrics.delivery import Delivery
from sgpu.metrics.progress import Point
from sgpu.metrics.recorder import Recorder
from sgpu.metrics.writer import TrackingDownError, TrackingRefusedError

from .conftest import HandMadeRun, MakeRun, MlflowServer, free_port

WriterOf = Callable[[HandMadeRun], Any]


@pytest.fixture
def writer_of() -> WriterOf:
    from sgpu.metrics.mlflow_writer import MlflowWriter

    def make(run: HandMadeRun) -> MlflowWriter:
        spec = read_spec(run.dir)
        return MlflowWriter(
            run.dir,
            spec.tracking,
            name=spec.name,
            created_seconds=spec.created,
            parameters=facts.parameters(spec),
            tags=facts.tags(run.dir, spec),
        )

    return make


def deliver(run: HandMadeRun, writer: object) -> Delivery:
    delivery = Delivery(run.dir, world_size=run.world_size, writer=writer, sampled=lambda most: [])  # type: ignore[arg-type]
    while not delivery.idle:
        delivery.turn()
    return delivery


def test_nested_under_the_run_of_the_notebook(make_run: MakeRun, server: MlflowServer, writer_of: WriterOf) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(server.url)
    experiment = client.create_experiment("a notebook's own")
    parent = client.create_run(experiment)
    run = make_run(server.url, parent=parent.info.run_id)
    spec = read_spec(run.dir)
    tracking = dataclasses.replace(spec.tracking, experiment_id=experiment)
    dataclasses.replace(spec, tracking=tracking).write(run.dir)
    writer_of(run).open()
    assert run.held().info.experiment_id == experiment, "the id beats the name"
    assert run.held().data.tags["mlflow.parentRunId"] == parent.info.run_id


def test_a_refused_value_loses_itself_alone(make_run: MakeRun, server: MlflowServer, writer_of: WriterOf) -> None:
    run = make_run(server.url)
    run.generation(0, range(1, 21))
    broken = '{"time": 1, "step": 30, "generation": 0, "values": {"a:b?": 1.0, "fine": 2.0}}\n'
    with run.dir.spool(0).open("a") as spool:
        spool.write(broken)
    delivery = deliver(run, writer_of(run))
    assert delivery.refused == 1
    assert "a:b?" in delivery.refusal
    assert run.raw_steps("loss") == run.raw_steps("rank1/loss") == list(range(1, 21))
    assert run.values("fine") == {30: 2.0}


def test_many_points_come_back_thinned(
    make_run: MakeRun, server: MlflowServer, writer_of: WriterOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(server.url, world_size=1)
    recorder = Recorder(run.dir, rank=0, generation=0)
    for step in range(1, 3001):
        recorder.log(step, {"loss": 1 / step, "acc": float("nan") if step == 5 else 0.5})
    recorder.close()
    deliver(run, writer_of(run))
    assert run.raw_steps("loss") == list(range(1, 3001))
    assert run.values("acc")[5] != run.values("acc")[5], "NaN stays"
    thinned = mlflow_reader.history(run.uri, run.link.run_id, "loss", most_points=100)
    assert len(thinned) <= 110
    assert (thinned[0].step, thinned[-1].step) == (1, 3000)
    assert progress.read(run.dir).marks["loss"] == 3000
    both = dict(mlflow_reader.histories(run.uri, run.link.run_id, most_points=100))
    assert set(both) == {"loss", "acc"}
    assert both["loss"] == thinned
    monkeypatch.setattr(mlflow_reader, "_LONG_STEPS", 1000)
    told = list(mlflow_reader.histories(run.uri, run.link.run_id, most_points=100))
    assert {key for key, _ in told[:2]} == {key for key, _ in told[2:]} == {"loss", "acc"}
    assert dict(told[2:])["loss"] == both["loss"]
    outline = dict(told[:2])["loss"]
    assert (outline[0].step, outline[-1]) == (1, thinned[-1])
    assert 8 <= len(outline) <= 17
    assert max(after.step - before.step for before, after in itertools.pairwise(outline)) <= 3000 // 8 + 1
    with pytest.raises(SgpuError, match="cannot read MLflow"):
        list(mlflow_reader.histories(run.uri, "0" * 32, most_points=100))


def test_a_server_is_read_without_mlflow(make_run: MakeRun, server: MlflowServer, writer_of: WriterOf) -> None:
    run = make_run(server.url, world_size=2)
    run.generation(0, range(1, 11))
    deliver(run, writer_of(run))
    code = (
        "import sys; from sgpu.metrics.mlflow_reader import histories\n"
        f"found = dict(histories({run.uri!r}, {run.link.run_id!r}, most_points=100))\n"
        "print(sorted(found), [p.step for p in found['loss']], 'mlflow' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'loss'" in told
    assert "'rank1/loss'" in told
    assert told.strip().endswith("[1, 2, 3, 4, 5, 6, 7, 8, 9, 10] False")


def test_opening_again_changes_nothing(make_run: MakeRun, server: MlflowServer, writer_of: WriterOf) -> None:
    run = make_run(server.url)
    first = writer_of(run).open()
    before = run.held()
    spec = read_spec(run.dir)
    dataclasses.replace(spec, parameters={"lr": "99", "new": "1"}).write(run.dir)
    assert writer_of(run).open() == first
    run.dir.mlflow.unlink()
    assert writer_of(run).open() == first, "found by its tag"
    assert run.held().data.params == {**before.data.params, "new": "1"}, "a value once given stays"


def test_marks_are_the_last_steps_that_mlflow_has(make_run: MakeRun, server: MlflowServer, writer_of: WriterOf) -> None:
    run = make_run(server.url)
    writer = writer_of(run)
    writer.open()
    now = time.time()
    writer.log([Point(key="a", value=float(s), step=s, time_seconds=now - s) for s in (1, 3, 2)])
    writer.log([Point(key="b", value=float("inf"), step=0, time_seconds=now)])
    assert writer.marks() == {"a": 3, "b": 0}


def test_a_deleted_run_and_a_deleted_experiment_are_told_as_such(
    make_run: MakeRun, server: MlflowServer, writer_of
) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(server.url)
    run = make_run(server.url)
    run.generation(0, range(1, 5))
    writer = writer_of(run)
    writer.open()
    client.delete_run(run.link.run_id)
    with pytest.raises(TrackingRefusedError, match="was deleted") as told:
        deliver(run, writer)
    assert told.value.gone
    with pytest.raises(TrackingRefusedError, match="was deleted"):
        writer_of(run).open()

    client.delete_experiment(client.create_experiment("old"))
    other = make_run(server.url, experiment="old")
    with pytest.raises(TrackingRefusedError, match="mlflow experiments restore"):
        writer_of(other).open()


def test_a_server_that_is_not_there_is_down_not_refusing(
    make_run: MakeRun,
    writer_of: WriterOf,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(TrackingDownError):
        writer_of(make_run(f"http://127.0.0.1:{free_port()}")).open()
    (tmp_path / "broken.db").write_bytes(b"this is no database" * 1000)
    with pytest.raises(TrackingDownError):
        writer_of(make_run(f"sqlite:///{tmp_path}/broken.db")).open()
