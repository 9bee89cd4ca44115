"""What is left of an epoch whose samples nobody can count: blocks of files, some of them partly read. Pure.

A block is some neighbouring files of the order. Each rank has a sequence of blocks; its workers take them in turn. What
is left of all ranks' sequences can be dealt anew to any other ranks and workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The sequence of one rank: blocks with how many of their samples are done, then every `stride`-th from `start`.

    Attributes:
        blocks: in the whole epoch.
    """

    head: tuple[tuple[int, int], ...] = ()
    start: int
    stride: int
    blocks: int

    @property
    def items(self) -> int:
        return len(self.head) + len(range(self.start, self.blocks, self.stride))

    def item(self, number: int) -> tuple[int, int]:
        """A block, and how many of its samples are done."""
        past = number - len(self.head)
        return self.head[number] if past < 0 else (self.start + past * self.stride, 0)

    def after(self, places: Sequence[tuple[int, int] | None]) -> Rest:
        """What is left once workers are where they are.

        Args:
            places: for each worker: which of its items it reads, and how many samples of it are done; None: it ended.
        """
        workers = len(places)
        turns = [place[0] for place in places if place is not None]
        first = min(turns, default=0) * workers
        last = self.items  # where somebody ended, not much is left
        if len(turns) == workers:
            last = min(last, (max(turns) + 1) * workers)
        left = []
        for number in range(first, last):
            place = places[number % workers]
            block, done = self.item(number)
            if place is not None and number // workers >= place[0]:
                left.append((block, max(done, place[1]) if number // workers == place[0] else done))
        past = last - len(self.head)
        return Rest(
            head=(*left, *self.head[last:]), start=self.start + max(0, past) * self.stride, stride=self.stride,
            blocks=self.blocks,
        )  # fmt: skip


def dealt(rests: Sequence[Rest], *, rank: int, world: int) -> Rest:
    """What one of `world` ranks gets of what all former ranks left."""
    blocks = rests[0].blocks
    tail = max(rest.start for rest in rests)
    left = [item for rest in rests for item in rest.head]
    left += [(block, 0) for rest in rests for block in range(rest.start, min(tail, blocks), rest.stride)]
    return Rest(head=tuple(sorted(left)[rank::world]), start=tail + rank, stride=world, blocks=blocks)
