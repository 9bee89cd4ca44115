"""What all ranks need of a checkpoint is read, and checked, once: each rank its part, into memory the others can see.

On one machine they look into each other's memory; between machines, one rank of each sends what its machine has read
to one of each other machine.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from sgpu.checkpoint.format import checksum
from sgpu.checkpoint.format.metadata_pickle import Place
from sgpu.checkpoint.restoring.ranks import Ranks
from sgpu.checkpoint.restoring.reading import PIECE_BYTES, ItemReader, Key
from sgpu.checkpoint.restoring.sources import BLOCK_BYTES, REQUESTS, Region
from sgpu.checkpoint.writing.segment import Segment
from sgpu.contract.errors import CheckpointError

# Less than this is read by every rank for itself.
LEAST_BYTES = 2**20
# An item is read in pieces of so much, several at a time.
JOB_BYTES = 8 * BLOCK_BYTES
SENT_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a rank tells the others before it reads: what it needs, and where its memory can be looked into."""

    digest: str
    pid: int
    descriptor: int
    token: str


@dataclass(frozen=True, kw_only=True)
class _Job:
    name: str
    file: str
    offset: int
    target: memoryview


class SharedReading:
    """One restore's. Order of calls, on every rank: `offer`; with everybody's offers `agree`; where that is True
    `read_own`; with what everybody `reaches`, and when all have read, `exchange`.

    Args:
        ranks: the collectives.
        segment: this rank's memory, which is overwritten.
        reader: of the checkpoint.
        wanted: items that this rank needs whole, and supposes all others to need as well.
    """

    def __init__(self, ranks: Ranks, segment: Segment, reader: ItemReader, wanted: Iterable[Key]) -> None:
        self._ranks = ranks
        self._segment = segment
        self._reader = reader
        found = ((key, reader.place(key)) for key in wanted if key[1] is not None)
        places = {_order(place): (key, place) for key, place in found}
        self._items = [places[order] for order in sorted(places)]
        self._parts = _deal([place.size_bytes for _, place in self._items], ranks.world_size)
        self.reaches: frozenset[int] = frozenset()
        self._seen: dict[int, Segment] = {}

    def offer(self) -> Offer:
        token = secrets.token_bytes(Segment.TOKEN_BYTES)
        self._segment.token = token
        told = repr([(_order(place), place.size_bytes) for _, place in self._items])
        return Offer(
            digest=checksum.text(checksum.of(told.encode())), pid=os.getpid(), descriptor=self._segment.descriptor,
            token=token.hex(),
        )  # fmt: skip

    def agree(self, offers: list[Offer | None], stack: ExitStack) -> bool:
        """Whether it is worth while, and possible: the same answer on all ranks."""
        known = [offer for offer in offers if offer is not None]
        size = sum(place.size_bytes for _, place in self._items)
        if len(known) < len(offers) or len({offer.digest for offer in known}) > 1 or size < LEAST_BYTES:
            return False
        self._seen = {self._ranks.rank: self._segment}
        for rank, offer in enumerate(known):
            if rank != self._ranks.rank and (found := look_into(offer)) is not None:
                stack.callback(found.close)
                self._seen[rank] = found
        self.reaches = frozenset(self._seen)
        return True

    def read_own(self) -> None:
        """Raises CheckpointCorruptError where an item is not what was written."""
        own = self._parts[self._ranks.rank]
        self._segment.reserve(sum(self._items[at][1].size_bytes for at in own))
        memory, start = self._segment.view(), 0
        jobs: list[list[_Job]] = []
        for at in own:
            key, place = self._items[at]
            starts = range(0, place.size_bytes, JOB_BYTES)
            jobs.append([
                _Job(
                    name=key[0], file=place.file, offset=place.offset + begin,
                    target=memory[start + begin : start + min(begin + JOB_BYTES, place.size_bytes)],
                ) for begin in starts
            ])  # fmt: skip
            start += place.size_bytes
        with ThreadPoolExecutor(REQUESTS if self._reader.sources.remote else self._reader.threads) as pool:
            sums = list(pool.map(self._read, [job for of_item in jobs for job in of_item]))
        for at, of_item in zip(own, jobs, strict=True):
            found, sums = sums[: len(of_item)], sums[len(of_item) :]
            whole = 0
            for job, value in zip(of_item, found, strict=True):
                whole = checksum.combine(whole, value, job.target.nbytes)
            key, place = self._items[at]
            item = self._reader.item(key)
            if item is not None:
                self._reader.compare(item, whole, place.file)

    def _read(self, job: _Job) -> int:
        value = 0
        step = BLOCK_BYTES if self._reader.sources.remote else PIECE_BYTES  # a local piece is checked in the cache
        for start in range(0, job.target.nbytes, step):
            piece = job.target[start : start + step]
            self._reader.sources.read_into(job.file, job.offset + start, piece, job.name)
            value = checksum.of(piece, value)
        return value

    def exchange(self, reaches: list[frozenset[int]], stack: ExitStack) -> list[Region]:
        """All of it as regions in memory that this rank can see.

        Raises:
            CheckpointError: on all ranks, where something was damaged on its way to another machine.
        """
        leaders = [min(reach) if all(reaches[rank] == reach for rank in reach) else at
                   for at, reach in enumerate(reaches)]  # fmt: skip
        seen = {rank: segment.view() for rank, segment in self._seen.items()}
        if len(set(leaders)) > 1:
            seen |= self._over_network(leaders, stack)
        regions = []
        for owner, own in enumerate(self._parts):
            start = 0
            for at in own:
                place = self._items[at][1]
                memory = seen[owner][start : start + place.size_bytes]
                regions.append(Region(file=place.file, offset=place.offset, memory=memory, owner=owner))
                start += place.size_bytes
        return regions

    def _over_network(self, leaders: list[int], stack: ExitStack) -> dict[int, memoryview]:
        """Memory of the owners on other machines, as this machine's leader has received it."""
        me, sizes = self._ranks.rank, [sum(self._items[at][1].size_bytes for at in own) for own in self._parts]
        foreign = [owner for owner in range(self._ranks.world_size) if leaders[owner] != leaders[me]]
        starts = {owner: sum(sizes[other] for other in foreign if other < owner) for owner in foreign}
        guest, trouble = Segment(), ""
        stack.callback(guest.close)
        guest.token = token = secrets.token_bytes(Segment.TOKEN_BYTES)
        group = self._ranks.subgroup(sorted(set(leaders)))
        if leaders[me] == me:
            guest.reserve(sum(sizes[owner] for owner in foreign))
            memory = guest.view()
            for owner, size in enumerate(sizes):
                held = self._seen[owner].view() if owner not in starts else memory[starts[owner] :]
                _broadcast(held[:size], leaders[owner], group)
            trouble = self._check({owner: memory[starts[owner] :] for owner in foreign})
            dist.destroy_process_group(group)
        offer = Offer(digest=trouble, pid=os.getpid(), descriptor=guest.descriptor, token=token.hex())
        told = self._ranks.gather(offer)
        found = guest if leaders[me] == me else look_into(told[leaders[me]])
        if found is not None and found is not guest:
            stack.callback(found.close)
        reasons = self._ranks.gather(trouble or ("" if found is not None else "the memory of its leader is gone"))
        for rank, reason in enumerate(reasons):
            if reason:
                raise CheckpointError(f"{self._reader.opened.path} could not be shared: rank {rank}: {reason}")
        assert found is not None  # no rank had a reason
        return {owner: found.view()[start : start + sizes[owner]] for owner, start in starts.items()}

    def _check(self, received: dict[int, memoryview]) -> str:
        """What is wrong with what came over the network; empty where nothing is."""
        for owner, memory in received.items():
            start = 0
            for at in self._parts[owner]:
                key, place = self._items[at]
                item = self._reader.item(key)
                value = checksum.of(memory[start : start + place.size_bytes])
                if item is not None and value != item.crc32c:
                    return f"{key[0]} was damaged on its way from rank {owner}"
                start += place.size_bytes
        return ""


def look_into(offer: Offer) -> Segment | None:
    """The other's memory, if it is a process of this machine that lets itself be looked into."""
    link = f"/proc/{offer.pid}/fd/{offer.descriptor}"
    try:
        if not os.readlink(link).startswith(Segment.LINK):
            return None
        found = Segment(os.open(link, os.O_RDWR | os.O_CLOEXEC))
    except OSError:
        return None
    if found.token == bytes.fromhex(offer.token):
        return found
    found.close()
    return None


def _order(place: Place) -> tuple[str, int]:
    return place.file, place.offset


def _deal(sizes: list[int], world_size: int) -> list[range]:
    """Neighbouring items to the same rank, about as many bytes to each."""
    total = max(1, sum(sizes))
    owners, seen = [], 0
    for size in sizes:
        owners.append(min(world_size - 1, (seen + size // 2) * world_size // total))
        seen += size
    ends = [sum(owner <= rank for owner in owners) for rank in range(world_size)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _broadcast(memory: memoryview, source: int, group: Any) -> None:
    if not memory.nbytes:
        return
    content = torch.frombuffer(memory, dtype=torch.uint8)
    for piece in torch.split(content, SENT_BYTES):
        dist.broadcast(piece, src=source, group=group)
