"""Laws 1 and 2 for whole runs: whatever failed, what each rank trained in each step is what the undisturbed run did.

A job notes each step in a `Ledger`, once in an undisturbed run and once in one that things happen to; `check_same`
holds the two against each other.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

from sgpu.contract import records


class Ledger:
    """What one rank did, over all its lives; a line a step, written in one piece."""

    def __init__(self, folder: str | os.PathLike[str], rank: int) -> None:
        self._path = _path(pathlib.Path(folder), rank)

    def note(self, step: int, **facts: Any) -> None:
        """`facts` are JSON values: samples, loss, draws."""
        records.append(self._path, {"step": step, **facts})


def _path(folder: pathlib.Path, rank: int) -> pathlib.Path:
    return folder / f"ledger{rank}.jsonl"


def steps_of(folder: pathlib.Path, rank: int) -> list[int]:
    """In the order in which they were done, those that were done again included."""
    return [record["step"] for record in records.read_all(_path(folder, rank))]


def check_same(undisturbed: pathlib.Path, disturbed: pathlib.Path, *, world_size: int) -> int:
    """Asserts that each rank did the same in each step, as often as it did it.

    Returns:
        How many steps were done again, over all ranks.

    Raises:
        AssertionError: the rank, the step, and both accounts of it.
    """
    again = 0
    for rank in range(world_size):
        expected = {record["step"]: record for record in records.read_all(_path(undisturbed, rank))}
        assert expected, f"rank {rank} of the undisturbed run did nothing"
        assert list(expected) == list(range(len(expected))), f"rank {rank}: the undisturbed run did {list(expected)}"
        found = records.read_all(_path(disturbed, rank))
        for record in found:
            told = expected.get(record["step"])
            assert record == told, f"rank {rank}, step {record['step']}: expected {told}, found {json.dumps(record)}"
        missing = expected.keys() - {record["step"] for record in found}
        assert not missing, f"rank {rank} never did the steps {sorted(missing)}"
        again += len(found) - len(expected)
    return again
