"""`sgpu.runtime.section`: what is declared is in the heartbeat page while it lasts, and no part of a step's time."""

from __future__ import annotations

import pathlib

import pytest

from sgpu import runtime
from sgpu.contract.beat import Section
from sgpu.contract.errors import InputError
from sgpu.contract.heartbeat import Page, Slot
from sgpu.contract.rundir import RunDir


@pytest.fixture
def slot(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Slot:
    """Rank 0's, of a run with an agent."""
    run = RunDir(tmp_path / "run")
    run.create()
    page = Page.create(run.heartbeat, 1)
    monkeypatch.setenv("SGPU_RUN_DIR", str(run.root))
    slot = page.slot(0)
    slot.start(0)
    slot.beat(7)
    slot.enter(Section.STEP)
    return slot


def _now(slot: Slot) -> tuple[Section, str, float]:
    beat = slot.read()
    return beat.section, beat.section_name, beat.section_limit_seconds


def test_a_section_is_seen_while_it_lasts(slot: Slot) -> None:
    since = slot.read().section_since_ns
    with runtime.section("évaluation of it all", 90):
        assert _now(slot) == (Section.USER, "évaluation of it all", 90.0)
        with runtime.section("checkpoint"):
            assert _now(slot) == (Section.CHECKPOINT, "checkpoint", 0.0)
        assert _now(slot) == (Section.USER, "évaluation of it all", 90.0)
    assert _now(slot) == (Section.STEP, "", 0.0)
    assert slot.read().section_since_ns > since, "the step's silence begins anew"
    assert slot.read().step == 7


def test_it_ends_with_an_error_too(slot: Slot) -> None:
    seen = []

    def fails() -> None:
        with runtime.section("evaluation"):
            seen.append(_now(slot)[0])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert seen == [Section.EVALUATION]
    assert _now(slot) == (Section.STEP, "", 0.0)


def test_steps_may_go_on_inside(slot: Slot) -> None:
    with runtime.section("a whole loop", 5):
        slot.beat(8)
        slot.enter(Section.DATA)
    assert slot.read().step == 8
    assert _now(slot) == (Section.STEP, "", 0.0)


def test_what_is_nested_is_counted_once(slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(runtime.time, "perf_counter", lambda: now[0])
    before = runtime.declared_seconds()
    with runtime.section("outer"):
        now[0] += 1
        for _ in range(2):
            with runtime.section("inner"):
                now[0] += 10
        now[0] += 1
    assert runtime.declared_seconds() - before == pytest.approx(22)


def test_without_an_agent_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGPU_RUN_DIR", raising=False)
    with runtime.section("export", limit_seconds=1):
        pass


@pytest.mark.parametrize(
    ("name", "limit"),
    [("", None), ("x" * 25, None), ("é" * 13, None), (None, None), (7, None), ("step", None), ("init", 5), ("data", 5),
     ("user", None), ("export", 0), ("export", -1), ("export", float("inf")), ("export", float("nan")),
     ("export", "9")],
)  # fmt: skip
def test_what_cannot_be_is_refused(name: object, limit: object) -> None:
    with pytest.raises(InputError, match="section"), runtime.section(name, limit):  # type: ignore[arg-type]
        raise AssertionError("it was entered")
