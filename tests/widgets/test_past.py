"""A long run: a preview at once, all of it soon; and from MLflow what its spools no longer hold."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sgpu.contract import atomic
from sgpu.contract.errors import SgpuError
from sgpu.metrics import mlflow_reader
from sgpu.metrics.mlflow_reader import MetricPoint
from sgpu.widgets.reading import past as past_module
from sgpu.widgets.reading import preview
from sgpu.widgets.reading.feed import Feed
from sgpu.widgets.reading.past import Past
from sgpu.widgets.reading.series import Buffer
from sgpu.widgets.reading.spools import Spools

CUT = 20_000  # the spool of `cut` begins here
STEPS = 30_000
LINE = '{"time": %d, "step": %d, "generation": 0, "values": {"loss": %d, "lr": 0.1}}\n'


@pytest.fixture
def cut(run: Any) -> Any:
    """A run whose spool lost its front, and whose MLflow run is known."""
    run.dir.spool(0).write_text("".join(LINE % (step, step, step) for step in range(CUT, STEPS)))
    atomic.write_json(run.dir.mlflow, {"run_id": "abc", "tracking_uri": "http://127.0.0.1:1", "url": "x"})
    return run


def thinned(_uri: str, _run_id: str, *, most_points: int) -> Iterator[tuple[str, list[MetricPoint]]]:
    assert most_points <= 1000
    loss = [MetricPoint(step=step, value=float(step), time_seconds=float(step)) for step in range(0, STEPS, 30)]
    loss[1] = MetricPoint(step=30, value=math.nan, time_seconds=30.0)
    other = [MetricPoint(step=5, value=7.0, time_seconds=5.0)]
    yield from (("loss", loss), ("rank1/loss", other), ("early", other))


def refreshed(spools: Spools) -> int:
    reads = 0
    while reads == 0 or not spools.caught_up:
        spools.refresh()
        reads += 1
        assert reads < 1000
    return reads


def test_what_was_cut_comes_from_mlflow(cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_reader, "histories", thinned)
    spools = Spools(cut.dir, 2, Past(cut.dir))
    refreshed(spools)
    loss = spools.series()["loss"]
    assert (loss.steps[0], loss.values[0], loss.steps[-1]) == (0, 0.0, STEPS - 1)
    assert loss.note == "1 value is not finite (NaN at step 30)"
    assert list(loss.steps) == sorted(set(loss.steps))
    assert all(value is None or step == value for step, value in zip(loss.steps, loss.values, strict=True))
    assert spools.series()["early"].values == (7.0,)
    assert spools.series()["rank1/loss"].rank == 1
    assert spools.note == "metrics before step 20,000 are as MLflow thins them"
    assert spools.first == (0.0, 0)
    cut.metrics(STEPS, loss=1.0)
    spools.refresh()
    assert spools.series()["loss"].steps[-1] == STEPS


def refuse(*_args: Any, **_facts: Any) -> Iterator[tuple[str, list[MetricPoint]]]:
    raise SgpuError("the server is away")


def test_without_an_answer_the_spool_is_shown(cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_reader, "histories", refuse)
    spools = Spools(cut.dir, 2, Past(cut.dir))
    refreshed(spools)
    loss = spools.series()["loss"]
    assert (loss.steps[0], loss.steps[-1], loss.logged) == (CUT, STEPS - 1, STEPS - CUT)
    assert spools.note == ""


def test_a_server_that_never_answers_is_not_waited_for(cut: Any, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_module.Past, "_read", lambda *_: None)
    spools = Spools(cut.dir, 1, Past(cut.dir, clock=clock))
    for _ in range(3):
        spools.refresh()
        assert not spools.caught_up
    assert spools.note == "the beginning of the charts is being read from MLflow"
    clock.now += past_module.PATIENCE_SECONDS + 1
    spools.refresh()
    assert spools.caught_up
    assert spools.note == ""


def test_a_whole_spool_asks_nobody(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Past, "ask", lambda _: pytest.fail("MLflow was asked"))
    run.metrics(1, loss=1.0)
    refreshed(Spools(run.dir, 2, Past(run.dir)))


def test_an_ended_run_is_final_only_with_its_beginning(cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_reader, "histories", thinned)
    cut.status("SUCCEEDED", step=STEPS, ended=cut.created + 9)
    feed = Feed(cut.dir)
    snapshot = feed.snapshot()
    while snapshot.behind:
        assert not snapshot.final
        snapshot = feed.snapshot()
    assert snapshot.final
    assert snapshot.series["loss"].steps[0] == 0
    feed.close()


def test_a_spool_that_is_cut_while_it_is_followed_is_read_on(run: Any) -> None:
    spools = Spools(run.dir, 2)
    for step in range(50):
        run.metrics(step, loss=float(step))
    spools.refresh()
    run.dir.spool(0).write_text(LINE % (50, 50, 50))
    spools.refresh()
    assert spools.series()["loss"].steps == tuple(range(51))


def test_of_a_long_spool_a_sample_is_shown_until_all_is_read(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "LONG_BYTES", 100_000)
    run.dir.spool(0).write_text("".join(LINE % (step, step, step) for step in range(STEPS)))
    run.dir.spool(1).write_text("not json\n" * 5 + LINE % (7, 7, 7))
    spools = Spools(run.dir, 2)
    spools.refresh()
    first = spools.series()
    steps = first["loss"].steps
    assert (steps[0], steps[-1]) == (0, STEPS - 1)
    assert 180 <= len(steps) <= 1000
    assert max(after - before for before, after in itertools.pairwise(steps)) < STEPS / 80
    assert first["rank1/loss"].steps == (7,)
    assert spools.note == "the charts are a sample until all metrics are read"
    assert not spools.caught_up
    assert refreshed(spools) >= 3
    assert spools.series()["loss"].logged == STEPS
    assert spools.note == ""


def test_a_sample_takes_whole_lines_alone(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "spool"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(5000)) + '{"step": 99')
    found = [record["step"] for record in preview.lines(path, path.stat().st_size, 1)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 4999)
    assert len(list(preview.lines(path, path.stat().st_size, 10_000))) == 21


def test_points_before_are_thinned_with_the_rest() -> None:
    buffer = Buffer("loss", 0)
    for step in range(5000, 6000):
        buffer.put(step, 1.0)
    assert buffer.put_before([(step, 50.0 if step == 777 else 0.0) for step in range(5500)])
    assert not buffer.put_before([(5000, 9.0)])
    series = buffer.series()
    assert len(series.steps) <= 1000
    assert (series.steps[0], series.steps[-1]) == (0, 5999)
    assert max(value for value in series.values if value is not None) == 50.0


def test_a_few_points_first_give_way_to_all_of_them() -> None:
    buffer = Buffer("loss", 0)
    for step in range(100, 103):
        buffer.put(step, 1.0)
    buffer.put_before([(0, 5.0), (50, math.nan)])
    outline = buffer.series()
    assert (outline.steps, outline.logged) == ((0, 50, 100, 101, 102), 5)
    buffer.put_before([(step, math.inf if step == 7 else 2.0) for step in range(100)])
    whole = buffer.series()
    assert (whole.steps, whole.logged) == (tuple(range(103)), 103)
    assert whole.note == "1 value is not finite (infinity at step 7)"
    assert whole.values[0] == 2.0
    assert whole.version > outline.version


def test_charts_reach_from_end_to_end_before_the_server_has_read_everything(
    cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = threading.Event()

    def outlined(_uri: str, _run_id: str, *, most_points: int) -> Iterator[tuple[str, list[MetricPoint]]]:
        for every in (STEPS // 8, 30):
            yield "loss", [MetricPoint(step=s, value=float(s), time_seconds=float(s)) for s in range(0, STEPS, every)]
            assert drawn.wait(60)

    monkeypatch.setattr(mlflow_reader, "histories", outlined)
    spools = Spools(cut.dir, 1, Past(cut.dir))
    while "loss" not in spools.series() or spools.series()["loss"].steps[0]:
        spools.refresh()
    assert not spools.caught_up
    assert sum(step < CUT for step in spools.series()["loss"].steps) == 6
    drawn.set()
    refreshed(spools)
    assert sum(step < CUT for step in spools.series()["loss"].steps) > 100
