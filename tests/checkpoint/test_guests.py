"""Images that are kept for a neighbour: one a rank, within bounds, and never written while somebody may read them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sgpu.checkpoint.helper.guests import Guests
from sgpu.checkpoint.helper.peer_wire import PeerError
from sgpu.checkpoint.writing.job import Layout, Row, SaveJob
from sgpu.checkpoint.writing.segment import Segment

PLENTY = 2**40
SIZE = 3_000_000


def job(rank: int = 0, *, folder: str = "step-00000001", generation: int = 0) -> SaveJob:
    row = Row(
        names=("w",), dtype="uint8", shape=(SIZE,), offsets=(0,), sizes=(SIZE,), head_bytes=0, data_bytes=SIZE,
        size_bytes=SIZE,
    )  # fmt: skip
    return SaveJob(
        folder=folder, step=1, attempt=0, generation=generation, rank=rank, world_size=2,
        layout=Layout(id="1", view="1", rows=(row,)), objects={}, rank_bytes=150,
    )  # fmt: skip


def _memory(segment: Segment) -> tuple[int, int]:
    found = os.fstat(segment.descriptor)
    return found.st_dev, found.st_ino


def test_memory_is_bounded() -> None:
    guests = Guests(1, lambda: 4 * SIZE)
    kept: list[tuple[int, int]] = []
    for step in range(4):
        incoming = guests.admit(job(folder=f"step-0000000{step}"))
        kept.append(_memory(incoming.segment))
        with pytest.raises(PeerError, match=r"expected those of \['__0_0.distcp', 'rank-0.pt'\]"):
            _filled(incoming).check([])
        guests.keep("u", incoming, [])
    assert len(set(kept)) == 2  # one that is kept, and one that the next comes into
    with pytest.raises(PeerError, match=r"images of 1 ranks are kept here already \(\[0\]\)"):
        guests.admit(job(rank=1))
    guests = Guests(1, lambda: SIZE)
    with pytest.raises(PeerError, match=r"no room: 3000150 more bytes are needed, 3000000 are free"):
        guests.admit(job())


def test_what_an_earlier_generation_left_gives_way_to_ranks_of_other_numbers() -> None:
    """The world was resized: node 1 has the ranks 1 and 2 now, where it had 2 and 3."""
    guests = Guests(2, lambda: PLENTY)
    for rank in (2, 3):
        guests.keep("u", _filled(guests.admit(job(rank))), [])
    first = guests.admit(job(1, generation=1))
    assert _held(guests) == [(2, 0), (3, 0)]  # until the new one is complete
    guests.keep("u", _filled(first), [])
    guests.keep("u", _filled(guests.admit(job(2, generation=1))), [])
    assert (1, 1) in _held(guests)
    assert (2, 1) in _held(guests)
    assert len(_held(guests)) == 2
    with pytest.raises(PeerError, match=r"images of 2 ranks are kept here already \(\[1, 2\]\)"):
        guests.admit(job(5, generation=1))


def _held(guests: Guests) -> list[tuple[int, int]]:
    """Rank and generation of each."""
    found = []
    for loan in guests.lend("u"):
        found.append((loan.job.rank, loan.job.generation))
        loan.segment.close()
    return found


def test_memory_that_was_lent_is_not_written_again() -> None:
    guests = Guests(1, lambda: PLENTY)
    guests.keep("u", _filled(guests.admit(job())), [])
    (lent,) = guests.lend("u")
    for _ in range(3):
        guests.keep("u", _filled(guests.admit(job())), [])
        assert _memory(guests.admit(job()).segment) != _memory(lent.segment)
    assert bytes(lent.segment.view()[:1]) == b"\1"


def _filled(incoming: Any) -> Any:
    def receive(target: memoryview) -> int:
        target[:] = b"\1" * target.nbytes
        return target.nbytes

    while incoming.left:
        incoming.fill(receive, 1_000_000)
    return incoming
