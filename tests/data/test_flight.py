"""How many downloads are on their way: more while it pays, fewer where it does not, by the rule and by threads."""

from __future__ import annotations

import functools
import threading

import pytest

from sgpu.data.fetching.flight import Flight
from sgpu.data.fetching.lanes import Lanes

LATENCY_SECONDS, BANDWIDTH, SIZE = 0.02, 100e6, 100_000.0


def rate(limit: int, latency_seconds: float = LATENCY_SECONDS) -> float:
    """A volume with 20 ms an open and 100 MB/s gives its all to 20 files of 100 kB at a time."""
    return min(BANDWIDTH, limit * SIZE / latency_seconds)


@pytest.mark.parametrize("start", [8, 40])
def test_it_comes_to_where_more_brings_no_more(start: int) -> None:
    flight = Flight(limit=start, least=8, most=256)
    seen = []
    for _ in range(60):
        flight = flight.after(rate(flight.limit), busy=True)
        seen.append(flight.limit)
    assert rate(max(8, sorted(seen[20:])[20])) == BANDWIDTH
    assert max(seen) <= max(32, start * 1.25)


def test_it_follows_a_volume_that_becomes_slower_to_answer() -> None:
    flight = Flight(limit=8, least=8, most=256)
    for _ in range(40):
        flight = flight.after(rate(flight.limit), busy=True)
    near = flight.limit
    for _ in range(80):
        flight = flight.after(rate(flight.limit, 5 * LATENCY_SECONDS), busy=True)
    assert flight.limit > 2 * near


def test_a_window_that_says_nothing_changes_nothing() -> None:
    flight = Flight(limit=8, least=4, most=10)
    assert flight.after(1e9, busy=False) == flight
    assert flight.after(0.0, busy=True) == flight
    assert flight.after(1e9, busy=True).limit == 10
    assert flight.after(1e9, busy=True).after(2e9, busy=True).limit == 10


def test_threads_are_as_many_as_the_rule_says_and_all_tasks_run() -> None:
    lock, now, most, done = threading.Lock(), [0.0], [0, 0], [0]

    def task() -> int:
        with lock:
            most[0] += 1
            most[1] = max(most)
            now[0] += 0.01
            done[0] += 1
        with lock:
            most[0] -= 1
        return 1000

    lanes = Lanes(Flight(limit=2, least=2, most=6), clock=lambda: now[0])
    lanes.submit([task] * 2000)
    lanes.drain()
    assert done == [2000]
    assert most[1] <= 6
    assert 2 <= lanes.flight.limit <= 6
    lanes.drain()
    lanes.submit([task])
    lanes.drain()
    assert done == [2001]


def test_idle_threads_take_what_comes_also_when_there_are_more_than_pay() -> None:
    together = threading.Barrier(6)

    def with_the_others() -> int:
        together.wait(60)
        return 0

    lanes = Lanes(Flight(limit=6, least=2, most=6), idle_seconds=600.0)
    lanes.submit([with_the_others] * 6)
    assert lanes.drain(60)
    lanes.flight = Flight(limit=2, least=2, most=6)
    done: list[int] = []
    for number in range(3):
        lanes.submit([functools.partial(_note, done, number)])
        assert lanes.drain(60)
    assert done == [0, 1, 2]


def _note(done: list[int], number: int) -> int:
    done.append(number)
    return 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_task_that_raises_against_its_word_ends_its_own_thread_only() -> None:
    def wrong() -> int:
        raise RuntimeError("against its word")

    lanes, done = Lanes(Flight(limit=2, least=2, most=2), idle_seconds=600.0), list[int]()
    lanes.submit([wrong, functools.partial(_note, done, 1)] * 10)
    assert lanes.drain(60)
    assert done == [1] * 10


def test_threads_that_the_system_refuses_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, did = Lanes(Flight(limit=6, least=6, most=6)), list[bool]()
    start, refused = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if lanes._running > 2:
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def task() -> int:
        did.append(refused.wait(60))
        return 1

    monkeypatch.setattr(threading.Thread, "start", refuse)
    lanes.submit([task] * 50)
    assert lanes.drain(60)
    assert did == [True] * 50


def test_where_not_one_thread_is_given_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        Lanes(Flight(limit=6, least=6, most=6)).submit([int])
