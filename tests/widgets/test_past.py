"""A long run is shown from the ends of its spools at once; its beginning comes from MLflow, or else from them."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sgpu.contract import atomic
from sgpu.contract.errors import SgpuError
from sgpu.metrics import mlflow_reader
from sgpu.metrics.mlflow_reader import MetricPoint
from sgpu.widgets import past as past_module
from sgpu.widgets import spools as spools_module
from sgpu.widgets.feed import Feed
from sgpu.widgets.past import Past, tail_offset
from sgpu.widgets.series import Buffer
from sgpu.widgets.spools import Spools

STEPS = 3000
LINE = '{"time": %d, "step": %d, "generation": 0, "values": {"loss": %d, "lr": 0.1}}\n'
Answer = Callable[..., dict[str, list[MetricPoint]]]


@pytest.fixture
def long_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whose spool counts as long, and whose MLflow run is known."""
    monkeypatch.setattr(spools_module, "LONG_BYTES", 50_000)
    monkeypatch.setattr(spools_module, "TAIL_BYTES", 10_000)
    run.dir.spool(0).write_text("".join(LINE % (step, step, step) for step in range(STEPS)))
    atomic.write_json(run.dir.mlflow, {"run_id": "abc", "tracking_uri": "http://127.0.0.1:1", "url": "x"})
    return run


def answers(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> None:
    monkeypatch.setattr(mlflow_reader, "histories", answer)


def thinned(_uri: str, _run_id: str, *, most_points: int) -> dict[str, list[MetricPoint]]:
    assert most_points <= 1000
    loss = [MetricPoint(step=step, value=float(step), time_seconds=float(step)) for step in range(0, STEPS, 30)]
    loss[1] = MetricPoint(step=30, value=math.nan, time_seconds=30.0)
    other = [MetricPoint(step=5, value=7.0, time_seconds=5.0)]
    return {"loss": loss, "rank1/loss": other, "early": other}


def refreshed(spools: Spools) -> int:
    reads = 0
    while reads == 0 or not spools.caught_up:
        spools.refresh()
        reads += 1
        assert reads < 1000
    return reads


def test_the_end_is_there_at_once_and_the_beginning_comes_from_mlflow(
    long_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, thinned)
    spools = Spools(long_run.dir, 2, Past(long_run.dir))
    spools.refresh()
    steps = spools.series()["loss"].steps
    assert steps[-1] == STEPS - 1
    assert steps[0] > 0 or spools.caught_up
    refreshed(spools)
    loss = spools.series()["loss"]
    assert (loss.steps[0], loss.values[0], loss.steps[-1]) == (0, 0.0, STEPS - 1)
    assert loss.note == "1 value is not finite (NaN at step 30)"
    assert list(loss.steps) == sorted(set(loss.steps))
    assert all(value is None or step == value for step, value in zip(loss.steps, loss.values, strict=True))
    assert spools.series()["early"].values == (7.0,)
    assert spools.series()["rank1/loss"].rank == 1
    assert spools.note.endswith("are as MLflow thins them")
    assert spools.first == (0.0, 0)
    long_run.metrics(STEPS, loss=1.0)
    spools.refresh()
    assert spools.series()["loss"].steps[-1] == STEPS


def refuse(*_args: Any, **_facts: Any) -> dict[str, list[MetricPoint]]:
    raise SgpuError("the server is away")


def test_without_an_answer_all_of_the_spool_is_read(long_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, refuse)
    spools = Spools(long_run.dir, 2, Past(long_run.dir))
    refreshed(spools)
    loss = spools.series()["loss"]
    assert (loss.steps[0], loss.steps[-1], loss.logged) == (0, STEPS - 1, STEPS)
    assert spools.note == ""


def test_a_server_that_never_answers_is_not_waited_for(
    long_run: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_module.Past, "_read", lambda *_: None)
    spools = Spools(long_run.dir, 1, Past(long_run.dir, clock=clock))
    spools.refresh()
    assert not spools.caught_up
    assert "being read from MLflow" in spools.note
    clock.now += past_module.PATIENCE_SECONDS + 1
    refreshed(spools)
    assert spools.series()["loss"].logged == STEPS


def test_a_spool_that_was_cut_is_completed_and_a_short_one_asks_nobody(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    answers(monkeypatch, lambda uri, run_id, **facts: asked.append(run_id) or thinned(uri, run_id, **facts))
    atomic.write_json(run.dir.mlflow, {"run_id": "abc", "tracking_uri": "http://127.0.0.1:1"})
    run.metrics(1, loss=1.0)
    refreshed(Spools(run.dir, 2, Past(run.dir)))
    assert asked == []
    run.dir.spool(0).write_text(LINE % (2500, 2500, 2500))
    spools = Spools(run.dir, 2, Past(run.dir))
    refreshed(spools)
    assert asked == ["abc"]
    assert spools.series()["loss"].steps[0] == 0


def test_an_ended_run_is_final_only_with_its_beginning(long_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, thinned)
    long_run.status("SUCCEEDED", step=STEPS, ended=long_run.created + 9)
    feed = Feed(long_run.dir)
    snapshot = feed.snapshot()
    while snapshot.behind:
        assert not snapshot.final
        snapshot = feed.snapshot()
    assert snapshot.final
    assert snapshot.series["loss"].steps[0] == 0
    feed.close()


def test_the_tail_begins_with_a_whole_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "spool"
    path.write_text("".join(f"{number:08}\n" for number in range(100)))
    assert tail_offset(path, 900, 100) == 0
    offset = tail_offset(path, 899, 100)
    assert offset % 9 == 0
    assert 800 <= offset < 809 + 9
    assert tail_offset(tmp_path / "none", 1, 1) == 0


def test_points_before_are_thinned_with_the_rest() -> None:
    buffer = Buffer("loss", 0)
    for step in range(5000, 6000):
        buffer.put(step, 1.0)
    assert buffer.put_before([(step, 50.0 if step == 777 else 0.0) for step in range(5500)])
    assert not buffer.put_before([(0, 9.0)])
    series = buffer.series()
    assert len(series.steps) <= 1000
    assert (series.steps[0], series.steps[-1]) == (0, 5999)
    assert max(value for value in series.values if value is not None) == 50.0
