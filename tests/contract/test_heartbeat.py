"""The heartbeat page: what it tells survives its writer, and its ledger loses no second."""

from __future__ import annotations

import itertools
import pathlib
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from sgpu.contract import heartbeat
from sgpu.contract.heartbeat import Category, Page, Request, Section, WorkerState

_SECOND = 1_000_000_000


@pytest.fixture
def page(tmp_path: pathlib.Path) -> Page:
    return Page.create(tmp_path / "heartbeat.page", 2)


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A monotonic clock that a test sets: `now[0]` in nanoseconds."""
    now = [100 * _SECOND]
    monkeypatch.setattr(heartbeat.time, "monotonic_ns", lambda: now[0])
    return now


def _passes(now: list[int], seconds: float) -> None:
    now[0] += int(seconds * _SECOND)


def test_a_beat_is_read_through_another_mapping(page: Page, tmp_path: pathlib.Path) -> None:
    slot = page.slot(1)
    slot.start(3, pid=77)
    slot.enter(Section.CHECKPOINT, limit_seconds=12.5)
    slot.beat(41, epoch=2, total_steps=100)
    seen = Page(tmp_path / "heartbeat.page").beats()
    assert seen[0].state is WorkerState.ABSENT
    beat = seen[1]
    assert (beat.step, beat.epoch, beat.total_steps, beat.generation, beat.pid) == (41, 2, 100, 3, 77)
    assert (beat.section, beat.section_limit_seconds, beat.state) == (Section.CHECKPOINT, 12.5, WorkerState.TRAINING)


def test_ledger_sums_to_wall_time(ticking: list[int], tmp_path: pathlib.Path) -> None:
    """Through every category, two restarts and the end: the parts are the whole, to the nanosecond."""
    page = Page.create(tmp_path / "heartbeat.page", 1)
    born = ticking[0]
    _passes(ticking, 1.5)
    for generation in range(3):
        slot = page.slot(0)
        slot.start(generation)
        for category, seconds in zip(Category, itertools.count(0.25, 0.5)):
            slot.account(category)
            _passes(ticking, seconds)
            slot.beat(10 * generation + int(category))
        _passes(ticking, 7.0)  # dead until the next start
    before_end = page.slot(0).read().ledger_seconds(ticking[0])
    assert sum(before_end.values()) == pytest.approx((ticking[0] - born) / _SECOND, rel=1e-9)
    slot.finish()
    _passes(ticking, 1000)
    after = page.slot(0).read().ledger_seconds(ticking[0])
    assert sum(after.values()) - sum(before_end.values()) == pytest.approx(1000), "it waits for the others"
    assert after["idle"] - before_end["idle"] == pytest.approx(1000)
    page.close_ledgers()
    _passes(ticking, 1000)
    assert page.slot(0).read().ledger_seconds(ticking[0]) == after, "time after the end is nobody's"


def test_a_restart_is_charged_from_the_last_beat_on(ticking: list[int], tmp_path: pathlib.Path) -> None:
    page = Page.create(tmp_path / "heartbeat.page", 1)
    slot = page.slot(0)
    slot.start(0)
    slot.account(Category.PRODUCTIVE)
    _passes(ticking, 10)
    slot.beat(7)
    _passes(ticking, 4)  # killed somewhere in here
    page.slot(0).start(1)
    _passes(ticking, 2)
    page.slot(0).read()
    found = page.slot(0).read().ledger_seconds(ticking[0])
    assert found["productive"] == pytest.approx(10)
    assert found["restarting"] == pytest.approx(4 + 2)
    again = page.slot(0)
    assert (again.high_step, again.read().step, again.generation) == (7, 0, 1)
    again.beat(3)
    assert page.slot(0).read().high_step == 7


def test_what_was_heard_and_answered_stands_beside_the_beats(tmp_path: pathlib.Path) -> None:
    page = Page.create(tmp_path / "heartbeat.page", 2)
    slot, listener = page.slot(0), page.slot(0)
    assert (slot.read().heard, slot.read().answers) == (-1, 0)
    listener.answer()
    slot.beat(1)
    listener.hear(3)
    listener.answer()
    slot.request(Request.SAVE_AND_STOP, stop_step=6)
    page.slot(1).mirror(slot.read())
    for beat in page.beats():
        assert (beat.heard, beat.answers, beat.step) == (3, 2, 1)


def test_the_pause_before_a_resume_is_nobodys(ticking: list[int], tmp_path: pathlib.Path) -> None:
    page = Page.create(tmp_path / "heartbeat.page", 1)
    slot = page.slot(0)
    slot.start(0)
    slot.account(Category.PRODUCTIVE)
    _passes(ticking, 10)
    slot.beat(5)
    slot.request(Request.SAVE_AND_STOP, stop_step=6)
    _passes(ticking, 3600)
    page.slot(0).resume()
    _passes(ticking, 1)
    page.slot(0).start(1)
    found = page.slot(0).read()
    assert sum(found.ledger_seconds(ticking[0]).values()) == pytest.approx(11, abs=1e-6)
    assert found.high_step == 5
    assert page.slot(0).requested().what is Request.NONE


def test_a_life_that_nobody_closed_ends_with_the_last_sign_of_any_rank(ticking: list[int], page: Page) -> None:
    born = ticking[0]
    for rank in range(2):
        page.slot(rank).start(0)
        page.slot(rank).account(Category.PRODUCTIVE)
    _passes(ticking, 10)
    page.slot(0).beat(5)
    _passes(ticking, 2)
    page.slot(1).beat(6)
    life = (ticking[0] - born) / _SECOND
    _passes(ticking, 3600)  # the agent is killed, and its workers with it
    page.resume()
    _passes(ticking, 4)
    found = [beat.ledger_seconds(ticking[0]) for beat in page.beats()]
    assert [sum(each.values()) for each in found] == pytest.approx([life + 4] * 2)
    assert [each["productive"] for each in found] == pytest.approx([10, 12])
    assert [each["idle"] for each in found] == pytest.approx([2, 0])
    assert [each["starting"] for each in found] == pytest.approx([4, 4])


def test_a_rank_that_is_done_without_is_idle_until_it_is_started_again(ticking: list[int], page: Page) -> None:
    slot = page.slot(1)
    slot.start(0)
    slot.account(Category.PRODUCTIVE)
    slot.beat(3)
    _passes(ticking, 6)  # lost; the others find out
    page.slot(1).leave()
    _passes(ticking, 100)
    page.slot(1).start(2)
    _passes(ticking, 1)
    found = page.slot(1).read().ledger_seconds(ticking[0])
    assert (found["restarting"], found["idle"], found["productive"]) == pytest.approx((7, 100, 0))
    _passes(ticking, 5)
    page.close_ledgers()
    closed = page.slot(1).read()
    assert closed.ledger_seconds(ticking[0])["idle"] == pytest.approx(106), "it gave no sign of life since its start"
    assert closed.ledger_seconds(None) == closed.ledger_seconds(ticking[0] + _SECOND)


def test_a_rank_that_returned_waits_until_another_fails(ticking: list[int], page: Page) -> None:
    slot = page.slot(0)
    slot.start(0)
    slot.account(Category.PRODUCTIVE)
    _passes(ticking, 10)
    slot.finish()
    _passes(ticking, 20)
    page.slot(0).start(1)
    _passes(ticking, 1)
    found = page.slot(0).read().ledger_seconds(ticking[0])
    assert (found["productive"], found["idle"], found["restarting"]) == pytest.approx((10, 20, 1))


def test_a_call_that_is_given_up_lost_what_followed_its_last_sign(ticking: list[int], page: Page) -> None:
    """Also where the process lives on: it waited for one that hung."""
    slot = page.slot(0)
    slot.start(0)
    slot.account(Category.PRODUCTIVE)
    _passes(ticking, 10)
    slot.beat(5)
    _passes(ticking, 60)
    slot.fail(parked=False)
    _passes(ticking, 1)
    slot.fail(parked=True)
    _passes(ticking, 2)
    page.slot(0).start(1)
    _passes(ticking, 4)
    found = page.slot(0).read().ledger_seconds(ticking[0])
    assert (found["productive"], found["restarting"]) == pytest.approx((10, 67))


_WORKER = """
import os, pathlib, sys
from sgpu.contract.heartbeat import Category, Page, Section
slot = Page(pathlib.Path(sys.argv[1])).slot(0)
slot.start(4)
slot.account(Category.PRODUCTIVE)
slot.enter(Section.STEP)
step = 0
while True:
    step += 1
    slot.beat(step)
    if step == 2000:
        print("beating", flush=True)
"""


def test_survives_kill_of_its_writer(page: Page, tmp_path: pathlib.Path) -> None:
    """Killed while it writes as fast as it can: what is read afterwards makes sense, and can be gone on with."""
    last = 0.0
    for _ in range(5):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WORKER, str(tmp_path / "heartbeat.page")], stdout=subprocess.PIPE
        )
        assert writer.stdout is not None
        with writer.stdout as output:
            assert output.readline() == b"beating\n"
        writer.kill()
        assert writer.wait(10) == -signal.SIGKILL
        beat = page.slot(0).read()
        assert beat.pid == writer.pid
        assert beat.generation == 4
        assert beat.step >= 2000
        assert beat.high_step >= beat.step
        assert beat.beat_ns <= time.monotonic_ns()
        total = sum(beat.ledger_seconds().values())
        assert total >= last
        last = total


def test_a_reader_never_sees_a_half_written_beat(page: Page, tmp_path: pathlib.Path) -> None:
    """One writes step == epoch == total; a reader in another process finds them equal each time."""
    script = _WORKER.replace("slot.beat(step)", "slot.beat(step, epoch=step, total_steps=step)")
    writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "heartbeat.page")], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        with writer.stdout as output:
            assert output.readline() == b"beating\n"
        seen: set[int] = set()
        began = time.monotonic()
        while time.monotonic() < began + 1.5 or len(seen) <= 100:
            assert time.monotonic() < began + 60, "the writer did not write while this read"
            beat = page.slot(0).read()
            assert beat.step == beat.epoch == beat.total_steps
            seen.add(beat.step)
    finally:
        writer.kill()
        writer.wait()


def test_a_writer_that_died_in_the_middle_blocks_nobody(page: Page) -> None:
    slot = page.slot(0)
    slot.start(0)
    slot.beat(5)
    struct.pack_into("<Q", page._memory, heartbeat._HEADER_BYTES, 7)  # odd: as if killed between the two halves
    assert page.slot(0).read().step == 5
    page.slot(0).beat(6)
    (sequence,) = struct.unpack_from("<Q", page._memory, heartbeat._HEADER_BYTES)
    assert sequence % 2 == 0
    assert page.slot(0).read().step == 6


def test_a_request_reaches_the_worker_and_is_not_undone_by_its_beats(page: Page) -> None:
    worker, supervisor = page.slot(0), page.slot(0)
    worker.start(0)
    supervisor.request(Request.SAVE_AND_STOP, stop_step=17, deadline_ns=5)
    worker.beat(16)
    asked = worker.requested()
    assert (asked.what, asked.stop_step, asked.deadline_ns) == (Request.SAVE_AND_STOP, 17, 5)


def test_wrong_files_and_ranks_are_refused(page: Page, tmp_path: pathlib.Path) -> None:
    with pytest.raises(IndexError, match="rank 2 has no slot; the page holds 2"):
        page.slot(2)
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"SGPUHB99" + bytes(500))
    with pytest.raises(ValueError, match="not a heartbeat page of this version"):
        Page(wrong)
    assert (tmp_path / "heartbeat.page").stat().st_mode & 0o777 == 0o600


def test_a_beat_costs_microseconds(page: Page) -> None:
    slot = page.slot(0)
    slot.start(0)
    best = min(_seconds_of_beats(slot, 1000) for _ in range(5)) / 1000
    assert best < 50e-6, f"{best * 1e6:.1f} microseconds a beat"


def _seconds_of_beats(slot: heartbeat.Slot, count: int) -> float:
    started = time.perf_counter()
    for step in range(count):
        slot.beat(step)
    return time.perf_counter() - started
