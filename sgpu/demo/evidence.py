"""What the ledgers of a run prove. Pure."""

from __future__ import annotations

import collections
import json
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was trained.

    Attributes:
        missing: (epoch, file) pairs that no step trained.
        repeated: (epoch, file) pairs that more than one step trained.
        differing: steps that were done again after a restart with other files than before.
        again: steps that were done again.
        resumed_at: when the slowest rank had completed its first step after the restart (seconds since 1970), or None.
    """

    epochs: int
    steps: int
    missing: int
    repeated: int
    differing: int
    again: int
    resumed_at: float | None

    @property
    def exactly_once(self) -> bool:
        return self.missing == 0 and self.repeated == 0 and self.differing == 0


def read(folder: pathlib.Path) -> dict[int, list[dict[str, Any]]]:
    """Each rank's lines, in the order they were written."""
    found = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        lines = path.read_text().splitlines()
        found[int(path.stem.removeprefix("rank"))] = [json.loads(line) for line in lines if line.endswith("}")]
    return found


def judge(lines: Mapping[int, Sequence[Mapping[str, Any]]], *, files: Sequence[str], epochs: int) -> Evidence:
    """Holds the ledgers against the volume.

    Args:
        lines: a rank to its lines; a step done again after a restart stands there twice, and the later one counts.
        files: the names that each epoch has to train once.
    """
    trained: dict[tuple[int, int], Mapping[str, Any]] = {}
    again, differing = set(), set()
    for rank, records in lines.items():
        for record in records:
            before = trained.get((rank, record["step"]))
            if before is not None:
                again.add(record["step"])
                if before["files"] != record["files"]:
                    differing.add(record["step"])
            trained[rank, record["step"]] = record
    counts = collections.Counter((record["epoch"], name) for record in trained.values() for name in record["files"])
    wanted = {(epoch, name) for epoch in range(epochs) for name in files}
    firsts = [_first_after_restart(records) for records in lines.values()]
    return Evidence(
        epochs=epochs,
        steps=max((step for _, step in trained), default=0),
        missing=len(wanted - counts.keys()),
        repeated=sum(count > 1 for count in counts.values()) + len(counts.keys() - wanted),
        differing=len(differing),
        again=len(again),
        resumed_at=max((first for first in firsts if first is not None), default=None),
    )


def _first_after_restart(records: Sequence[Mapping[str, Any]]) -> float | None:
    """When a rank's second process completed its first step."""
    return next((float(record["time"]) for record in records if record["pid"] != records[0]["pid"]), None)
