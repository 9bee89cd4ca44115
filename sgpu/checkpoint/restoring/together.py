"""All ranks read one checkpoint at once: what all of them need is read by one, and passed on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from sgpu.checkpoint.restoring.ranks import Ranks
from sgpu.checkpoint.restoring.reading import ItemReader, Key
from sgpu.checkpoint.restoring.sharing import SharedReading
from sgpu.checkpoint.writing.segment import Segment
from sgpu.contract.errors import CheckpointError


def prepare(
    ranks: Ranks, reader: ItemReader, wanted: Iterable[Key], check: Callable[[], None], stack: ExitStack
) -> None:
    """Afterwards `reader` has every wanted item checked, and holds in memory what all ranks want.

    Args:
        ranks: all of them call this.
        reader: of the same checkpoint on each rank.
        wanted: by this rank.
        check: what else has to hold here; raises a CheckpointError where it does not.
        stack: keeps the memory for as long as it is needed.

    Raises:
        CheckpointError: on all ranks, where one has found something wrong.
    """
    own = set(wanted)
    common = set.intersection(*ranks.gather(own))

    def compare() -> None:
        check()
        reader.verify(key for key in own if key not in common or key[1] is None)

    _agree(ranks, compare)
    segment = Segment()
    stack.callback(segment.close)
    shared = SharedReading(ranks, segment, reader, common)
    if not shared.agree([*ranks.gather(shared.offer())], stack):
        _agree(ranks, lambda: reader.verify(common))
        return
    _agree(ranks, shared.read_own)
    reader.sources.add(shared.exchange(ranks.gather(shared.reaches), stack))
    reader.memory_is_checked()


def _agree(ranks: Ranks, action: Callable[[], None]) -> None:
    failure: CheckpointError | OSError | None = None
    try:
        action()
    except (CheckpointError, OSError) as error:
        failure = error
    reasons = ranks.gather(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason is not None:
            raise CheckpointError(f"rank {rank} could not load it: {reason}", rank=rank)
