"""The planner without a browser: its facts, its words, what travels to the browser."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgpu.contract.errors import InputError
from sgpu.goodput import expected_goodput
from sgpu.widgets import GoodputPlanner, PlannerState
from sgpu.widgets.planning import text as planner_text
from sgpu.widgets.planning.knobs import SLIDERS, parse, tell
from sgpu.widgets.planning.model import LIMITS, PRESETS, changed, plan
from sgpu.widgets.planning.page import bundle
from sgpu.widgets.planning.past import measure
from sgpu.widgets.planning.widget import PlannerWidget, message

GOOD_DAY, LLAMA = (preset.failures_a_gpu_year for preset in PRESETS)
LLAMA_GPUS = 16_384


def failing(a_day: float, **values: float) -> PlannerState:
    """A job of 16,384 GPUs that fails so often a day."""
    return changed(PlannerState(gpus=LLAMA_GPUS, failures_a_gpu_year=a_day * 365 / LLAMA_GPUS), values)


@pytest.mark.parametrize(("gpus", "chance"), [(256, 0.191), (1024, 0.571)])
def test_the_chance_of_a_failure_on_a_good_day(gpus: int, chance: float) -> None:
    assert plan(PlannerState(gpus=gpus, days=30, failures_a_gpu_year=GOOD_DAY)).chance == pytest.approx(
        chance, abs=5e-4
    )


def test_llama_3_stopped_every_three_hours() -> None:
    assert pytest.approx(0.17, abs=0.005) == LLAMA
    view = plan(PlannerState(gpus=LLAMA_GPUS, days=54, failures_a_gpu_year=LLAMA))
    assert view.failures == pytest.approx(419)
    assert view.failures_low < 419 < view.failures_high
    assert 86400 / view.mtbf_seconds == pytest.approx(7.76, abs=0.005)


@pytest.mark.parametrize(("interval", "rough", "exact"), [(7200, 0.642, 0.684), (1800, 0.910, 0.913)])
def test_the_rule_of_thumb_is_off_for_long_intervals(interval: float, rough: float, exact: float) -> None:
    state = failing(8.6, interval_seconds=interval, stall_seconds=0, durable_seconds=0, detection_seconds=0,
                    restart_seconds=0)  # fmt: skip
    view = plan(state)
    assert view.first_order == pytest.approx(rough, abs=6e-4)
    assert view.goodput == pytest.approx(exact, abs=6e-4)
    warned = any("first-order estimate (64.2 %) is off" in words for words in planner_text.remarks(state, view))
    assert warned == (interval > 0.3 * view.mtbf_seconds)


@pytest.mark.parametrize(
    ("detection", "restart", "share"), [(600, 300, 0.872), (60, 60, 0.939), (30, 12, 0.947)]
)  # fmt: skip
def test_below_ten_minutes_detection_and_restart_matter_more_than_the_interval(
    detection: float, restart: float, share: float
) -> None:
    state = failing(8.63, interval_seconds=600, stall_seconds=5, durable_seconds=120, detection_seconds=detection,
                    restart_seconds=restart)  # fmt: skip
    view = plan(state)
    assert view.goodput == pytest.approx(share, abs=1e-3)
    gain = {knob.name: knob.gain for knob in view.knobs}
    if detection == 600:
        assert gain["detection"] > gain["restart"] > gain["interval"]
        assert "failures noticed in half the time would win 2.47 points" in planner_text.matters(state, view)
    assert view.best_goodput - view.goodput < 0.947 - 0.872


@pytest.mark.parametrize(("stall", "minutes"), [(1, 2.4), (5, 5.3), (30, 12.9)])
def test_youngs_interval_at_an_mtbf_of_2_79_hours(stall: float, minutes: float) -> None:
    view = plan(failing(24 / 2.79, stall_seconds=stall, durable_seconds=0))
    assert view.young_seconds / 60 == pytest.approx(minutes, abs=0.05)
    assert view.best_interval_seconds == pytest.approx(view.daly_seconds, rel=1e-3)


@given(
    gpus=st.integers(1, 100_000),
    rate=st.floats(1e-4, 50),
    stall=st.floats(0, 600),
    durable=st.floats(0, 3600),
    detection=st.floats(0, 3600),
)
def test_whatever_is_set_the_figures_hold_together(
    gpus: int, rate: float, stall: float, durable: float, detection: float
) -> None:
    state = PlannerState(
        gpus=gpus, failures_a_gpu_year=rate, stall_seconds=stall, durable_seconds=durable, detection_seconds=detection
    )
    view = plan(state)
    assert 0 <= view.goodput <= 0.999
    assert 0 <= view.chance <= 1
    assert view.failures_low <= math.ceil(view.failures)
    assert math.floor(view.failures) <= view.failures_high
    assert view.best_interval_seconds >= max(1, durable)
    assert all(share <= view.best_goodput + 1e-9 for at, share in view.curve if at >= max(1, durable))
    assert [at for at, _ in view.curve] == sorted({at for at, _ in view.curve})
    assert all(knob.gain >= 0 for knob in view.knobs)
    json.dumps(planner_text.render(state, view))


def test_the_best_interval_is_where_the_exact_goodput_is_largest() -> None:
    state = failing(24.0, stall_seconds=300, durable_seconds=0)
    best, other = plan(state).best_interval_seconds, {"stall_seconds": 300.0, "detection_seconds": 30.0}

    def goodput(interval: float) -> float:
        return expected_goodput(interval, 3600, restart_seconds=60, **other)

    assert goodput(best) > goodput(best * 1.01)
    assert goodput(best) > goodput(best * 0.99)


def test_no_checkpoint_starts_before_the_last_is_durable() -> None:
    state = failing(8.6, stall_seconds=0.1, durable_seconds=900)
    view = plan(state)
    assert view.limited
    assert view.best_interval_seconds == 900
    told = {figure.label: figure.note for figure in planner_text.figures(state, view)}
    assert told["best interval"].startswith("a checkpoint must be durable before the next one starts")


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("gpus", 0, "gpus must be a whole number from 1 to 1,000,000; found 0"),
        ("days", float("nan"), "days must be a number from 0.01 to 3,650; found nan"),
        ("days", "7", "days must be a number from 0.01 to 3,650; found '7'"),
        ("stall_seconds", -1, "stall_seconds must be a number from 0 to 86,400; found -1"),
        ("failures_a_gpu_year", None, "failures_a_gpu_year must be a number"),
        ("gpu", 1, "there is no knob 'gpu'; there are gpus, days"),
    ],
)
def test_what_cannot_be_is_refused(name: str, value: Any, said: str) -> None:
    planner = GoodputPlanner()
    before = planner.state
    with pytest.raises(InputError, match="^" + said.replace("(", "\\(")):
        planner.set({name: value})
    assert planner.state == before


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("gpus", "1,024", 1024), ("restart_seconds", "90", 90), ("restart_seconds", "2 min 30 s", 150),
     ("days", ".5", 0.5), ("restart_seconds", "1.5h", 5400), ("interval_seconds", " 1 H 5 Min ", 3900)],
)  # fmt: skip
def test_fields_take_what_people_write(name: str, text: str, value: float) -> None:
    assert parse(name, text) == value


@pytest.mark.parametrize(
    ("name", "text"), [("gpus", "many"), ("gpus", "8 9"), ("restart_seconds", "2 weeks"), ("restart_seconds", ""),
                       ("days", "1e3x"), ("restart_seconds", "-5"), ("days", "3 days")]
)  # fmt: skip
def test_fields_refuse_the_rest(name: str, text: str) -> None:
    with pytest.raises(InputError, match=name):
        parse(name, text)


def test_a_field_reads_back_what_it_shows() -> None:
    for slider in SLIDERS:
        for value in (slider.high, slider.high / 3):
            shown = parse(slider.name, tell(slider.name, round(value)))
            assert shown == pytest.approx(round(value), rel=0.02)
        assert slider.name in LIMITS


def test_past_runs_give_a_rate_and_times(run: Any, home: pathlib.Path) -> None:
    assert measure(home).preset() is None
    (home / "runs").mkdir(parents=True)
    run.event("run_started", world_size=2)
    run.event("checkpoint_committed", step=1, blocked_seconds=0.5, save_seconds=4.5, after_seconds=10)
    run.event("checkpoint_committed", step=2, blocked_seconds=None, save_seconds="x", after_seconds=20)
    run.event("failure", cause="ValueError", rank=1, step=3, after_seconds=30)
    run.event("restarting", from_step=2, after_seconds=30)
    run.event("resumed", from_step=2, seconds=7.0, after_seconds=37)
    run.event("failure", cause="SIGKILL, signal 9", rank=1, step=5, after_seconds=1800)
    run.dir.root.rename(home / "runs" / "20261130-first")
    past = measure(home)
    assert (past.runs, past.failures, past.gpu_seconds) == (1, 2, 3600.0)
    assert (past.stall_seconds, past.durable_seconds, past.restart_seconds) == (0.5, 4.0, 7.0)
    preset = past.preset()
    assert preset is not None
    assert preset.failures_a_gpu_year == pytest.approx(2 * 365 * 24)
    assert preset.source == "2 failures in 1 run, 1 h of one worker's time in all"
    state = past.times(PlannerState())
    assert (state.stall_seconds, state.durable_seconds, state.restart_seconds) == (0.5, 4.0, 7.0)
    assert state.detection_seconds == 0


def test_a_bug_that_ended_its_run_is_no_failure_of_the_machine(run: Any, home: pathlib.Path) -> None:
    (home / "runs").mkdir(parents=True)
    run.event("run_started", world_size=2)
    run.event("failure", cause="ValueError", rank=1, step=3, after_seconds=1800)
    run.dir.root.rename(home / "runs" / "20261130-bug")
    past = measure(home)
    preset = past.preset()
    assert past.failures == 0
    assert preset is not None
    assert preset.source.startswith("no failure (with 95 %, at most this rate) in 1 run")
    assert preset.failures_a_gpu_year == pytest.approx(3 * 365 * 24)


def test_the_text_says_all_that_matters() -> None:
    planner = GoodputPlanner(failing(8.63, interval_seconds=600, price=2))
    text = str(planner)
    for words in ("16,384 GPUs for 30 days", "goodput: 9", "best interval", "chance of a failure: over 99.9 %",
                  "in 9 cases of 10", "lost GPU hours", "lost money", "at 2 a GPU hour", "What matters most",
                  "independent of each other"):  # fmt: skip
        assert words in text
    assert "Llama 3" in str(GoodputPlanner())
    assert repr(GoodputPlanner(PlannerState(gpus=1, days=1))).startswith(
        "<GoodputPlanner: 1 GPU for 1 day, goodput 99."
    )


def test_the_form_that_stays() -> None:
    state = PlannerState(price=1.5)
    kept = bundle(state, plan(state))
    assert set(kept) == {"text/plain", "text/html", "image/png"}
    assert "<script" not in kept["text/html"]
    assert "<svg" not in kept["text/html"]
    assert "lost money" in kept["text/html"]


@pytest.fixture
def widget(monkeypatch: pytest.MonkeyPatch) -> Any:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(PlannerWidget, "send", lambda self, content, buffers=None: sent.append(content))
    planner = GoodputPlanner()
    made = planner._exhibit.widget
    made.sent, made.planner = sent, planner
    yield made
    planner.keep()


def test_a_slider_moves_the_plan_and_everything_that_shows_it(widget: Any) -> None:
    widget.take({"kind": "hello"})
    widget.take({"kind": "set", "name": "gpus", "value": 256, "asked": 1})
    assert widget.planner.state.gpus == 256
    assert widget.sent[-1]["title"] == "256 GPUs for 30 days"
    assert widget.sent[-1]["asked"] == 1
    assert [message["number"] for message in widget.sent] == list(range(1, len(widget.sent) + 1))
    widget.planner.set({"gpus": 512})
    assert widget.sent[-1]["title"] == "512 GPUs for 30 days"
    assert len(json.dumps(widget.sent[-1], allow_nan=False)) < 12_000


def test_a_field_takes_words_and_the_box_gives_the_interval_back(widget: Any) -> None:
    widget.take({"kind": "set", "name": "interval_seconds", "value": "20 min", "asked": 1})
    assert widget.planner.state.interval_seconds == 1200
    widget.take({"kind": "set", "name": "interval_seconds", "value": None, "asked": 2})
    assert widget.planner.state.interval_seconds is None


def test_what_cannot_be_is_told_and_answered(widget: Any) -> None:
    widget.take({"kind": "set", "name": "gpus", "value": "lots", "asked": 5})
    assert widget.sent[-1]["trouble"] == "gpus must be a number; found 'lots'"
    assert widget.sent[-1]["asked"] == 5
    assert widget.planner.state == PlannerState()


@pytest.mark.parametrize("content", [None, [], "set", {}, {"kind": "set"}, {"kind": "set", "name": "gpus"},
    {"kind": "set", "name": "__class__", "value": 1}, {"kind": "set", "name": "days", "value": [1]},
    {"kind": "set", "name": "days", "value": float("inf")}, {"kind": "set", "name": "gpus", "value": True},
    {"kind": "preset"}, {"kind": "preset", "name": ["x"]}, {"kind": ["hello"]}])  # fmt: skip
def test_whatever_a_browser_sends_is_data(widget: Any, content: Any) -> None:
    widget.take(content)
    assert widget.planner.state == PlannerState()


def test_presets_and_measured_times_can_be_chosen(widget: Any) -> None:
    widget.take({"kind": "preset", "name": PRESETS[0].name})
    assert widget.planner.state.failures_a_gpu_year == GOOD_DAY
    assert [preset["on"] for preset in message(widget.planner)["presets"]] == [True, False]
    widget.take({"kind": "preset", "name": "measured times"})  # nothing was measured here
    assert widget.planner.state.restart_seconds == PlannerState().restart_seconds


def test_planning_needs_no_ui_and_no_torch() -> None:
    code = (
        "import sys; from sgpu.widgets import GoodputPlanner; str(GoodputPlanner()); "
        "print([m for m in ('IPython', 'anywidget', 'ipywidgets', 'mlflow', 'torch') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
