"""Helpers of two nodes, driven alone: what is copied arrives whole, or not at all, and only from who belongs here."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from sgpu.checkpoint.helper import peer_wire
from sgpu.checkpoint.helper.guests import Guests, Loan, look_at
from sgpu.checkpoint.helper.peer_wire import PeerError
from sgpu.checkpoint.helper.peers import Node, Peers, connect
from sgpu.checkpoint.helper.replica import Copied, Copier, Failures, Offer
from sgpu.checkpoint.writing.job import Layout, Row, SaveJob
from sgpu.checkpoint.writing.segment import Segment
from sgpu.checkpoint.writing.write import sums_of
from sgpu.testing.proxy import FaultyProxy

PLENTY = 2**40
SIZE = 3_000_000
SECONDS = 30


def job(rank: int = 0, *, folder: str = "step-00000001", generation: int = 0, size: int = SIZE) -> SaveJob:
    half = size // 2
    rows = tuple(
        Row(
            names=(f"w{i}",), dtype="uint8", shape=(bytes_,), offsets=(0,), sizes=(bytes_,), head_bytes=0,
            data_bytes=bytes_, size_bytes=bytes_,
        ) for i, bytes_ in enumerate((half, size - half))
    )  # fmt: skip
    layout = Layout(id="1", view="1", rows=rows)
    return SaveJob(
        folder=folder, step=1, attempt=0, generation=generation, rank=rank, world_size=2, layout=layout, objects={},
        own_objects=(("box.skeleton", 100),), rank_bytes=50,
    )  # fmt: skip


def staged(a_job: SaveJob, fill: int, mark: int = 7) -> Segment:
    segment = Segment()
    segment.reserve(a_job.size_bytes)
    segment.write(0, bytes([fill, fill + 1, fill + 2]) * (a_job.size_bytes // 3 + 1))
    segment.mark = mark
    return segment


class Side:
    """A node's part of the second tier, in this process."""

    def __init__(self, number: int, folder: pathlib.Path, *, count: int = 2, most: int = 1) -> None:
        self.own: list[Loan] = []
        self.node = Node(number=number, count=count, address=f"127.0.0.{number + 2}", folder=folder)
        self.guests = Guests(most, lambda: PLENTY)
        self.peers = Peers(self.node, self.guests, self._loans)

    def _loans(self, url: str) -> list[Loan]:
        return [Loan(job=loan.job, written=loan.written, segment=look_at(loan.segment)) for loan in self.own]


class Copies:
    """A copier of one node, and how its copies ended."""

    def __init__(self, side: Side, *, bytes_per_second: float = 1e12) -> None:
        assert side.node.neighbour is not None
        to = side.node.neighbour
        self.ended: list[Copied] = []
        self.waited: list[float] = []
        self._news = threading.Condition()
        self.copier = Copier(lambda: connect(side.node, to), bytes_per_second=bytes_per_second, tell=self._tell)

    def _tell(self, copied: Copied) -> None:
        with self._news:
            self.ended.append(copied)
            self._news.notify_all()

    def __call__(self, a_job: SaveJob, segment: Segment, mark: int = 7) -> str | None:
        """Copies, and waits; the error, if there was one."""
        before = len(self.ended)
        self.offer(a_job, segment, mark)
        assert self.wait(before + 1)
        return self.ended[-1].error

    def offer(self, a_job: SaveJob, segment: Segment, mark: int = 7) -> None:
        self.copier.offer(
            Offer(
                url="file:///root", job=a_job, segment=segment, mark=mark,
                await_writing=self.waited.append, sums=lambda: sums_of(segment.view(), a_job.files),
            )
        )  # fmt: skip

    def wait(self, count: int) -> bool:
        with self._news:
            return self._news.wait_for(lambda: len(self.ended) >= count, SECONDS)


@pytest.fixture
def sides(tmp_path: pathlib.Path) -> Iterator[list[Side]]:
    yield from _open(tmp_path, 2)


def _open(tmp_path: pathlib.Path, count: int) -> Iterator[list[Side]]:
    found = [Side(number, tmp_path / "peers", count=count) for number in range(count)]
    for side in found:
        side.peers.open()
        side.peers.open()
    yield found
    for side in found:
        side.peers.close()


def held(side: Side) -> list[tuple[str, int, bytes]]:
    """Folder, rank and bytes of what is kept for the node before."""
    found = []
    for loan in side.guests.lend("file:///root"):
        assert loan.written == sums_of(loan.segment.view(), loan.job.files)
        found.append((loan.job.folder, loan.job.rank, bytes(loan.segment.view()[:3])))
        loan.segment.close()
    return found


def test_the_newest_complete_image_of_a_rank_is_kept(sides: list[Side]) -> None:
    copies = Copies(sides[0])
    for step, fill in ((1, 10), (2, 20), (3, 30)):
        one = job(folder=f"step-0000000{step}")
        assert copies(one, staged(one, fill)) is None
        assert held(sides[1]) == [(f"step-0000000{step}", 0, bytes([fill, fill + 1, fill + 2]))]
    assert copies.copier.failures(0).count == 0


def test_an_image_is_fetched_once_by_all_who_ask(sides: list[Side]) -> None:
    one = job()
    sides[1].own.append(Loan(job=one, written=[], segment=staged(one, 5)))
    wrong = ("file:///root", "step-00000009", 0)
    with pytest.raises(PeerError, match=r"rank 0 of step-00000009 could not be fetched: node 1: it holds no complete"):
        sides[0].peers.fetch(wrong, [1])
    sides[1].own[0] = Loan(job=one, written=sums_of(sides[1].own[0].segment.view(), one.files), segment=staged(one, 5))
    key = ("file:///root", "step-00000001", 0)
    first, second = sides[0].peers.fetch(key, [1]), sides[0].peers.fetch(key, [1])
    assert bytes(first.segment.view()[: one.size_bytes]) == bytes(sides[1].own[0].segment.view()[: one.size_bytes])
    assert _memory(first.segment) == _memory(second.segment)
    sides[0].peers.release("file:///root")
    assert _memory(sides[0].peers.fetch(key, [0, 1]).segment) != _memory(first.segment)


def _memory(segment: Segment) -> tuple[int, int]:
    found = os.fstat(segment.descriptor)
    return found.st_dev, found.st_ino


def test_memory_changed_before_it_is_fetched_is_not_taken(sides: list[Side]) -> None:
    one = job()
    segment = staged(one, 5)
    sides[1].own.append(Loan(job=one, written=sums_of(segment.view(), one.files), segment=segment))
    segment.write(2_000_000, b"\0")
    with pytest.raises(PeerError, match=r"__0_0.distcp, bytes 1500000 to 3000000: what came in is not what was sent"):
        sides[0].peers.fetch(("file:///root", "step-00000001", 0), [1])


def test_a_flipped_bit_on_the_wire_is_told_and_not_kept(sides: list[Side]) -> None:
    one = job()
    path = sides[0].node.endpoint(1)
    where = json.loads(path.read_text())
    copies = Copies(sides[0])
    with FaultyProxy(where["address"], where["port"]) as proxy:
        path.write_text(json.dumps({**where, "address": "127.0.0.1", "port": proxy.port}))
        proxy.fail("flip", after_bytes=1_000_000)
        error = copies(one, staged(one, 40))
        assert proxy.fired == 1
        assert error == (
            "the neighbour refused: __0_0.distcp, bytes 0 to 1500000: what came in is not what was sent"
        )  # fmt: skip
        assert held(sides[1]) == []
        assert copies(one, staged(one, 50)) is None
    assert held(sides[1]) == [("step-00000001", 0, bytes([50, 51, 52]))]
    assert copies.copier.failures(0) == Failures(count=1, error=error)
    assert copies.copier.failures(0).count == 0


@pytest.mark.parametrize("place", ["checkpoint.copy_half", "checkpoint.copy_arrived"])
def test_half_a_copy_is_never_taken(place: str, sides: list[Side], arm: Any) -> None:
    old, new = job(folder="step-00000001"), job(folder="step-00000002")
    copies = Copies(sides[0])
    assert copies(old, staged(old, 10)) is None
    fired = arm(f"{place}=errno:ECONNRESET")
    assert "failpoint" in str(copies(new, staged(new, 20)))
    assert place in "\n".join(fired())
    assert held(sides[1]) == [("step-00000001", 0, bytes([10, 11, 12]))]


def test_a_neighbour_that_takes_nothing_is_given_up(sides: list[Side], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_wire, "GREETING_SECONDS", 0.3)
    monkeypatch.setattr(peer_wire, "STALL_SECONDS", 0.3)
    path, one, large = sides[0].node.endpoint(1), job(), job(size=64_000_000)
    where, copies = json.loads(path.read_text()), Copies(sides[0])
    with FaultyProxy(where["address"], where["port"]) as proxy:
        path.write_text(json.dumps({**where, "address": "127.0.0.1", "port": proxy.port}))
        proxy.fail("hold")
        assert copies(one, staged(one, 1)) == "it took or gave too little within 0.3 s"
        assert proxy.fired == 1
    path.write_text(json.dumps(where))
    full = threading.Event()

    def stuck(target: memoryview) -> int:
        full.wait(SECONDS)
        raise PeerError("the end of this test")

    monkeypatch.setattr(peer_wire.PeerLink, "receive_bytes", lambda link, target: stuck(target))
    assert copies(large, staged(large, 1)) == "it took or gave too little within 0.3 s"
    full.set()
    assert held(sides[1]) == []


def test_the_next_save_overtakes_a_slow_copy(sides: list[Side]) -> None:
    copies = Copies(sides[0], bytes_per_second=SIZE)
    first, second = job(folder="step-00000001"), job(folder="step-00000002")
    segment = staged(first, 10, mark=1)
    copies.offer(first, segment, mark=1)
    segment.mark = 2  # as the next save does
    segment.write(0, b"new")
    copies.offer(second, segment, mark=2)
    assert copies.wait(2)
    assert [copied.job.step and copied.error is None for copied in copies.ended] == [False, True]
    assert copies.copier.failures(0).count == 1
    assert held(sides[1]) == [("step-00000002", 0, b"new")]


def test_a_stale_generation_is_refused(sides: list[Side]) -> None:
    copies, new = Copies(sides[0]), job(generation=2)
    assert copies(new, staged(new, 20)) is None
    old = job(generation=1, folder="step-00000009")
    assert copies(old, staged(old, 10)) == (
        "the neighbour refused: stale generation 1: this run is at generation 2"
    )  # fmt: skip
    sides[1].guests.note_generation(3)  # a trainer of the next one came
    assert "stale generation 2" in str(copies(new, staged(new, 10)))
    assert held(sides[1]) == [("step-00000001", 0, bytes([20, 21, 22]))]


def test_a_wrong_token_is_refused(sides: list[Side]) -> None:
    path, one = sides[0].node.endpoint(1), job()
    where = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    path.write_text(json.dumps({**where, "token": peer_wire.new_token()}))
    copies = Copies(sides[0])
    assert copies(one, staged(one, 10)) == "node 1 refused: wrong token, or no node of this run"
    path.write_text(json.dumps(where))
    assert copies(one, staged(one, 10)) is None


def test_a_neighbour_that_is_not_there(tmp_path: pathlib.Path) -> None:
    alone, one = Side(0, tmp_path / "peers"), job()
    copies = Copies(alone)
    assert "the checkpoint helper of node 1 has not come" in str(copies(one, staged(one, 1)))
    alone.node.folder.mkdir()
    with socket.create_server(("127.0.0.3", 0)) as closed:
        port = closed.getsockname()[1]
    alone.node.endpoint(1).write_text(json.dumps({"address": "127.0.0.3", "port": port, "token": "t"}))
    assert f"the checkpoint helper of node 1 does not answer at 127.0.0.3:{port}" in str(copies(one, staged(one, 1)))
    assert copies.copier.failures(0).count == 2
