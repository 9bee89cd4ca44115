"""Messages come in order and whole, whichever way each went, and nobody waits to send one."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest

from sgpu.data.positions.streams import Envelope, Kind
from sgpu.data.workers.queues import DirectQueue, with_direct_queues


@pytest.fixture
def queue() -> Iterator[Any]:
    made = with_direct_queues(None).Queue()
    assert isinstance(made, DirectQueue)
    yield made
    made.close()
    made.join_thread()


def received(queue: Any, count: int) -> list[Any]:
    return [queue.get(timeout=60) for _ in range(count)]


def test_small_messages_need_no_thread(queue: Any) -> None:
    for number in range(100):
        queue.put((number, None))
    assert queue._thread is None
    assert received(queue, 100) == [(number, None) for number in range(100)]


def test_what_one_process_puts_stays_in_order(queue: Any) -> None:
    messages = [1, bytes(100_000), 2, bytes(200_000), 3]
    for message in messages:
        queue.put(message)
    assert queue._thread is not None
    assert received(queue, 5) == messages


def test_a_full_pipe_is_not_waited_for(queue: Any) -> None:
    for number in range(3000):
        queue.put((number, b"x" * 100))
    assert queue._thread is not None
    assert [number for number, _ in received(queue, 3000)] == list(range(3000))


def test_a_lock_that_somebody_died_with_is_not_waited_for(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgpu.data.workers.queues._PATIENCE_SECONDS", 0.0)
    with queue._wlock:
        queue.put(1)
        queue.put(2)
        assert not queue._poll()
    assert received(queue, 2) == [1, 2]


class Counted:
    """How often it was pickled."""

    times = 0

    def __reduce__(self) -> tuple[Any, ...]:
        self.times += 1
        return int, (5,)


def test_nothing_is_pickled_twice(queue: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave a file open for each shared tensor."""
    monkeypatch.setattr("sgpu.data.workers.queues._is_ready", lambda _: False)
    counted = Counted()
    queue.put((1, counted))
    assert received(queue, 1) == [(1, 5)]
    assert counted.times == 1


def test_a_batch_without_a_slot_is_pickled_beside_the_next(queue: Any) -> None:
    queue.put((2, Envelope(Kind.BATCH, 0, 0, 3, "data")))
    assert queue._thread is not None
    assert received(queue, 1)[0][1].data == "data"


def test_a_closed_one_refuses() -> None:
    queue = with_direct_queues(multiprocessing.get_context("spawn")).Queue()
    queue.close()
    with pytest.raises(ValueError, match="closed"):
        queue.put(1)


def test_the_users_own_queues_stay() -> None:
    class Own(type(multiprocessing.get_context("fork"))):  # type: ignore[misc]
        def Queue(self, maxsize: int = 0) -> Any:
            return super().Queue(maxsize)

    context = Own()
    assert with_direct_queues(context) is context
