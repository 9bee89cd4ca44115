"""Which cached files make room for a new one. Pure.

First what no live process lists (other volumes, old versions, files that left the volume), oldest download first. Files
of a live listing are residents and stay: with half of the data fitting and a new order each epoch, keeping residents
and passing the rest through hits the upper bound of 50 %, where evicting the oldest hits 20 % and LRU 15 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CachedFile:
    """One file of the cache as a scan saw it.

    Attributes:
        resident: it belongs to the listing of a live process and is of the listed version.
        downloaded_ns: when it came, for the order among those that may go.
    """

    path: str
    size_bytes: int
    downloaded_ns: int
    resident: bool


def choose(files: Sequence[CachedFile], need_bytes: int) -> list[CachedFile]:
    """The files to remove so that `need_bytes` become free; none where that cannot be reached."""
    if need_bytes <= 0:
        return []
    chosen: list[CachedFile] = []
    won = 0
    for file in sorted((file for file in files if not file.resident), key=lambda file: (file.downloaded_ns, file.path)):
        chosen.append(file)
        won += file.size_bytes
        if won >= need_bytes:
            return chosen
    return []
