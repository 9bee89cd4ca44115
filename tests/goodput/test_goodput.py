"""The published figures that the planner must give, and laws that hold for every input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpu.contract.errors import InputError
from sgpu.goodput import (
    expected_failures,
    expected_goodput,
    failure_probability,
    failures_band,
    mtbf_seconds,
    optimal_interval_seconds,
    simulate,
)

MINUTE = 60.0
HOUR = 3600.0
OFTEN = mtbf_seconds(8.6)


@pytest.mark.parametrize(("gpus", "chance"), [(256, 0.191), (1024, 0.571)])
def test_chance_of_a_failure_in_a_month_at_one_percent_a_gpu_year(gpus: int, chance: float) -> None:
    assert failure_probability(gpus, 30, 0.01) == pytest.approx(chance, abs=0.0005)


@pytest.mark.parametrize(
    ("interval", "form", "share"),
    [
        (2 * HOUR, "first_order", 0.642),
        (2 * HOUR, "exact", 0.684),
        (30 * MINUTE, "first_order", 0.910),
        (30 * MINUTE, "exact", 0.913),
    ],
)
def test_goodput_at_8_6_failures_a_day(interval: float, form: str, share: float) -> None:
    assert expected_goodput(interval, OFTEN, form=form) == pytest.approx(share, abs=0.0005)  # type: ignore[arg-type]


def test_llama_3_stops() -> None:
    a_day = 419 / 54
    assert a_day == pytest.approx(7.76, abs=0.005)
    a_gpu_year = a_day * 365 / 16384
    assert a_gpu_year == pytest.approx(0.17, abs=0.005)
    p = -math.expm1(-a_gpu_year)
    assert expected_failures(16384, 54, p) == pytest.approx(419)


@pytest.mark.parametrize(
    ("detection", "restart", "share"),
    [(10 * MINUTE, 5 * MINUTE, 0.872), (MINUTE, MINUTE, 0.939), (30.0, 12.0, 0.947)],
)
def test_detection_and_restart_matter_more_than_the_interval(detection: float, restart: float, share: float) -> None:
    mtbf = mtbf_seconds(8.63)
    costs = {
        "stall_seconds": 5.0,
        "durable_seconds": 2 * MINUTE,
        "detection_seconds": detection,
        "restart_seconds": restart,
    }
    assert expected_goodput(10 * MINUTE, mtbf, **costs) == pytest.approx(share, abs=0.0006)
    drawn = simulate(10 * MINUTE, mtbf, days=1000, jobs=20, seed=3, **costs)
    assert drawn.goodput == pytest.approx(share, abs=0.0015)
    assert drawn.goodput_low <= drawn.goodput <= drawn.goodput_high


@pytest.mark.parametrize(("stall", "minutes"), [(1.0, 2.4), (5.0, 5.3), (30.0, 12.9)])
def test_youngs_interval_at_a_mtbf_of_2_79_hours(stall: float, minutes: float) -> None:
    assert optimal_interval_seconds(stall, 2.79 * HOUR) / MINUTE == pytest.approx(minutes, abs=0.05)


def test_daly_is_close_to_young_for_short_stalls_and_better_for_long_ones() -> None:
    assert optimal_interval_seconds(1, 1e6, form="daly") == pytest.approx(optimal_interval_seconds(1, 1e6), rel=1e-3)
    assert optimal_interval_seconds(500, 100, form="daly") == 100
    stall, mtbf = 600.0, HOUR

    def cost(form: str) -> float:
        interval = optimal_interval_seconds(stall, mtbf, form=form)  # type: ignore[arg-type]
        return expected_goodput(interval, mtbf, stall_seconds=stall)

    assert cost("daly") > cost("young")
    best = max(expected_goodput(t, mtbf, stall_seconds=stall) for t in range(60, 7200, 10))
    assert cost("daly") == pytest.approx(best, abs=1e-3)


@given(stall=st.floats(0.1, 600), mtbf=st.floats(600, 1e6), recovery=st.floats(0, 3600), other=st.floats(0.2, 5))
def test_availability_form_maximises_availability(stall: float, mtbf: float, recovery: float, other: float) -> None:
    def availability(interval: float) -> float:
        return interval / (interval + stall) * mtbf / (mtbf + recovery + interval / 2)

    best = optimal_interval_seconds(stall, mtbf, form="availability", recovery_seconds=recovery)
    assert availability(best) >= availability(best * other) - 1e-12
    assert best >= optimal_interval_seconds(stall, mtbf)


@given(
    interval=st.floats(1, 1e6), mtbf=st.floats(10, 1e9), stall=st.floats(0, 1e4), down=st.floats(0, 1e5),
    durable=st.floats(0, 1e4),
)  # fmt: skip
def test_goodput_is_a_share_and_never_above_99_9_percent(
    interval: float, mtbf: float, stall: float, down: float, durable: float
) -> None:
    for form in ("exact", "first_order"):
        share = expected_goodput(
            interval, mtbf, stall_seconds=stall, durable_seconds=durable, restart_seconds=down, form=form
        )  # type: ignore[arg-type]
        assert 0 <= share <= 0.999
        slower = expected_goodput(
            interval, mtbf, stall_seconds=stall, durable_seconds=durable, restart_seconds=down + 60, form=form
        )  # type: ignore[arg-type]
        assert slower <= share


def test_a_perfect_job_is_shown_as_99_9_percent() -> None:
    assert expected_goodput(60, 1e12) == 0.999
    assert simulate(60, 1e12, days=1, jobs=3).goodput == 0.999


@pytest.mark.parametrize("mean", [0.0, 0.3, 4.5, 60.0, 499.0, 501.0, 5000.0])
def test_band_holds_what_it_promises(mean: float) -> None:
    low, high = failures_band(mean, 0.9)
    within = (
        sum(math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(low, high + 1)) if mean else 1.0
    )
    assert within >= 0.9 - 1e-3
    assert low <= mean <= high


def test_simulation_is_pure() -> None:
    assert simulate(600, 9000, days=5, seed=1) == simulate(600, 9000, days=5, seed=1)
    assert simulate(600, 9000, days=5, seed=1) != simulate(600, 9000, days=5, seed=2)
    assert simulate(600, 86400, days=10, jobs=400).failures == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: failure_probability(0, 1), "gpus"),
        (lambda: failure_probability(1, -1), "days"),
        (lambda: failure_probability(1, 1, 1.0), "yearly_probability"),
        (lambda: mtbf_seconds(0), "failures_a_day"),
        (lambda: optimal_interval_seconds(-1, 1), "stall_seconds"),
        (lambda: optimal_interval_seconds(1, 0), "mtbf_seconds"),
        (lambda: optimal_interval_seconds(1, 1, form="best"), "form"),  # type: ignore[arg-type]
        (lambda: expected_goodput(0, 1), "interval_seconds"),
        (lambda: expected_goodput(1, 1, restart_seconds=float("nan")), "restart_seconds"),
        (lambda: expected_goodput(1, 1, form="rough"), "form"),  # type: ignore[arg-type]
        (lambda: simulate(1, 1, days=0), "days"),
        (lambda: simulate(1, 1, days=1, jobs=0), "jobs"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(call: object, name: str) -> None:
    with pytest.raises(InputError, match=rf"^{name} must be .*; found "):
        call()  # type: ignore[operator]
