"""Thinning keeps what a reader would miss; a step that is logged again counts once."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sgpu.widgets.reading.series import MAX_POINTS, Buffer, thin
from sgpu.widgets.reading.spools import MAX_SERIES, Spools

finite = st.floats(-1e9, 1e9)
values = st.lists(finite | st.just(math.nan) | st.just(math.inf), min_size=1, max_size=400)


@settings(deadline=None, max_examples=40)
@given(values=values, strides=st.lists(st.integers(1, 50), min_size=400, max_size=400), buckets=st.integers(1, 30))
def test_thinning_keeps_first_last_lowest_highest_and_gaps_of_each_bucket(
    values: list[float], strides: list[int], buckets: int
) -> None:
    steps = [sum(strides[: index + 1]) for index in range(len(values))]
    stay = thin(steps, values, buckets)
    assert stay == sorted(set(stay))
    assert len(stay) <= 5 * buckets
    shift = next(s for s in range(60) if (steps[-1] >> s) - (steps[0] >> s) < buckets)
    assert shift == 0 or (steps[-1] >> (shift - 1)) - (steps[0] >> (shift - 1)) >= buckets
    for bucket in range(steps[0] >> shift, (steps[-1] >> shift) + 1):
        inside = [index for index in range(len(steps)) if steps[index] >> shift == bucket]
        kept = [index for index in stay if index in inside]
        if not inside:
            continue
        assert kept[0] == inside[0]
        assert kept[-1] == inside[-1]
        before = [values[index] for index in inside if math.isfinite(values[index])]
        after = [values[index] for index in kept if math.isfinite(values[index])]
        assert bool(before) == bool(after)
        if before:
            assert (min(after), max(after)) == (min(before), max(before))
        assert (len(after) < len(kept)) == (len(before) < len(inside))


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 6000), seed=st.integers(0, 2**32), spike=st.integers(0, 5999))
def test_a_growing_series_stays_small_and_keeps_its_extremes(count: int, seed: int, spike: int) -> None:
    buffer = Buffer("loss", 0)
    truth = {}
    for step in range(count):
        truth[step] = 1e6 if step == spike else float((seed * (step + 1) * 2654435761) % 1000)
        buffer.put(step, truth[step])
    series = buffer.series()
    assert len(series.steps) <= MAX_POINTS
    assert series.logged == count
    assert list(series.steps) == sorted(set(series.steps))
    assert (series.steps[0], series.steps[-1]) == (0, count - 1)
    assert all(truth[step] == value for step, value in zip(series.steps, series.values, strict=True))
    assert max(v for v in series.values if v is not None) == max(truth.values())
    assert min(v for v in series.values if v is not None) == min(truth.values())


@settings(deadline=None, max_examples=40)
@given(puts=st.lists(st.tuples(st.integers(0, 2000), finite), min_size=1, max_size=1500))
def test_a_step_seen_again_counts_once_and_the_last_value_wins(puts: list[tuple[int, float]]) -> None:
    buffer = Buffer("loss", 0)
    truth: dict[int, float] = {}
    for step, value in puts:
        buffer.put(step, value)
        truth[step] = value
    series = buffer.series()
    assert list(series.steps) == sorted(set(series.steps))
    assert all(truth[step] == value for step, value in zip(series.steps, series.values, strict=True))
    assert (series.steps[0], series.steps[-1]) == (min(truth), max(truth))
    if len(truth) <= MAX_POINTS:
        assert dict(zip(series.steps, series.values, strict=True)) == truth


@settings(deadline=None, max_examples=40)
@given(count=st.integers(1, 5000), look_every=st.integers(1, 700))
def test_a_series_of_the_same_version_only_grows_at_its_end(count: int, look_every: int) -> None:
    buffer = Buffer("loss", 0)
    before = None
    for step in range(count):
        buffer.put(step, float(step % 7))
        if step % look_every:
            continue
        now = buffer.series()
        if before is not None and before.version == now.version:
            assert now.steps[: len(before.steps)] == before.steps
            assert now.values[: len(before.values)] == before.values
        before = now


def test_long_runs_are_equally_fine_everywhere() -> None:
    buffer = Buffer("loss", 0)
    for step in range(200_000):
        buffer.put(step, math.sin(step))
    steps = buffer.series().steps
    thinned = [step for step in steps if step < 180_000]  # what comes after may be waiting to be thinned
    quarters = [sum(1 for step in thinned if step // 45_000 == quarter) for quarter in range(4)]
    assert min(quarters) > 0.9 * max(quarters)
    assert min(quarters) > 80


def test_values_that_are_not_finite_are_gaps_with_a_note(run: Any) -> None:
    for step, value in enumerate([1.0, math.nan, math.inf, 2.0]):
        run.metrics(step, loss=value)
    spools = Spools(run.dir, 2)
    spools.refresh()
    series = spools.series()["loss"]
    assert series.values == (1.0, None, None, 2.0)
    assert series.note == "2 values are not finite (first: NaN at step 1)"
    assert series.latest == "2"


def test_only_what_is_new_is_read_and_torn_lines_wait(run: Any) -> None:
    spools = Spools(run.dir, 2)
    run.metrics(1, loss=1.0)
    spools.refresh()
    first = spools.series()["loss"]
    spools.refresh()
    assert spools.series()["loss"] is first
    path = run.dir.spool(0)
    with path.open("a") as file:
        file.write('{"time": 1, "step": 2, "generation": 0, "val')
    spools.refresh()
    assert spools.series()["loss"] is first
    with path.open("a") as file:
        file.write('ues": {"loss": 2.0}}\nnot json\n[1]\n{"step": "x", "values": {}}\n{"step": 3, "values": 7}\n')
    run.metrics(4, loss=4.0)
    spools.refresh()
    assert spools.series()["loss"].steps == (1, 2, 4)


def test_replayed_steps_and_ranks_and_what_is_no_number(run: Any) -> None:
    for step in (1, 2, 3):
        run.metrics(step, loss=float(step), name="text", flag=True, none=None, huge=10**400)
        run.metrics(step, rank=1, loss=-1.0)
    run.metrics(2, generation=1, loss=20.0)
    run.metrics(3, generation=0, loss=99.0)  # a worker that should be dead
    run.metrics(3, generation=1, loss=30.0)
    spools = Spools(run.dir, 2)
    spools.refresh()
    series = spools.series()
    assert sorted(series) == ["huge", "loss", "rank1/loss"]
    assert series["loss"].values == (1.0, 20.0, 30.0)
    assert series["rank1/loss"].rank == 1
    assert series["huge"].values == (None, None, None)


def test_own_metrics_come_first_and_too_many_names_are_told(run: Any) -> None:
    run.metrics(1, step_seconds=1.0, loss=1.0)
    run.metrics(2, **{f"metric{index}": 1.0 for index in range(MAX_SERIES)})
    spools = Spools(run.dir, 1)
    spools.refresh()
    assert next(iter(spools.series())) == "loss"
    assert list(spools.series())[-1] == "step_seconds"
    assert len(spools.series()) == MAX_SERIES
    assert spools.note == f"2 more metric names are not charted (at most {MAX_SERIES} are)"


def test_a_long_spool_is_read_in_portions(run: Any) -> None:
    line = '{"time": 1, "step": %d, "generation": 0, "values": {"loss": 1.0}}\n'
    run.dir.spool(0).write_text("".join(line % step for step in range(45_000)))
    run.dir.spool(1).write_text("".join(line % step for step in range(9_000)))
    spools = Spools(run.dir, 2)
    reads = 0
    while reads == 0 or not spools.caught_up:
        spools.refresh()
        reads += 1
    assert reads == 6
    assert spools.series()["loss"].steps[-1] == 44_999
    assert spools.series()["rank1/loss"].steps[-1] == 8_999
