"""Finding the files of a volume: those that a pattern names, sorted, under names that a cache folder can hold."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sgpu.contract.errors import VolumeError
from sgpu.data.volumes.entry import Entry, Volume
from sgpu.data.volumes.pattern import matcher

_LONGEST_NAME_BYTES = 255  # of a local file system
_SLASH, _DOT = b"/."
_TOLD = 3  # names of files that no pattern wanted


def list_volume(volume: Volume, pattern: str, paths: Sequence[str] | None = None) -> list[Entry]:
    """The files that `pattern` names, or `paths`, sorted by the bytes of their paths.

    Raises:
        VolumeError: none, or one of `paths` is not there, or a name that cannot be kept in a cache folder.
    """
    matches = matcher(pattern) if paths is None else set(paths).__contains__
    entries: list[Entry] = []
    others, some = 0, list[str]()
    for entry in volume.entries():
        if matches(entry.path):
            entries.append(entry)
        else:
            others += 1
            some += [repr(entry.path)] * (len(some) < _TOLD)
    if paths is not None and (missing := sorted(set(paths) - {entry.path for entry in entries})):
        raise VolumeError(
            f"volume {volume.url} lacks {len(missing)} of {len(paths)} files that were named, as {missing[0]!r}. Were "
            "they removed (vacuumed, for a table)? Take a version whose files are still there.",
            url=volume.url,
        )
    if not entries:
        raise VolumeError(
            f"volume {volume.url} has no file that matches {pattern!r}"
            + (f"; it has {others} others, as {', '.join(some)}. Check the pattern." if others else "; it is empty."),
            url=volume.url,
        )
    _sort(entries)
    _check_names(volume.url, [entry.path for entry in entries])
    return entries


def joined(texts: Sequence[str], between: str = "") -> bytes:
    """Texts as bytes, as a file system has them."""
    return between.join(texts).encode(sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())


def with_offsets(texts: Sequence[str]) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Texts as bytes one after the other, and where each begins (and the last ends). None holds a zero byte."""
    apart = np.frombuffer(joined(texts, "\0") + b"\0", np.uint8)
    ends = np.flatnonzero(apart == 0)
    return joined(texts), np.concatenate([[0], ends - np.arange(len(ends))])


def _sort(entries: list[Entry]) -> None:
    """By the bytes of their paths; where these are UTF-8, that is how Python orders the texts."""
    try:
        for entry in entries:
            entry.path.encode("utf-8")
    except UnicodeEncodeError:
        entries.sort(key=lambda entry: os.fsencode(entry.path))
    else:
        entries.sort(key=operator.itemgetter(0))


def _check_names(url: str, paths: Sequence[str]) -> None:
    """Refuses what a local folder cannot hold, and what would lead out of the cache."""
    if _has_unfit_names(paths):
        unfit = next(path for path in paths if "\0" in path or _has_unfit_names([path]))
        raise VolumeError(
            f"volume {url} has a file named {unfit!r}, which no local folder can hold. "
            "Rename it, or leave it out by pattern.",
            url=url,
        )
    folders: set[str] = set()
    for folder in {path.rpartition("/")[0] for path in paths}:
        above = folder
        while above and above not in folders:
            folders.add(above)
            above = above.rpartition("/")[0]
    if both := folders.intersection(paths):
        file = min(both)
        below = next(path for path in paths if path.startswith(f"{file}/"))
        raise VolumeError(
            f"volume {url} has both a file {file!r} and a file {below!r} below that name; a local folder "
            "cannot hold both. Rename one, or leave one out by pattern.",
            url=url,
        )


def _has_unfit_names(paths: Sequence[str]) -> bool:
    """Whether a part of any path is empty, ".", ".." or too long, or holds a zero byte. Of all at once."""
    text = np.frombuffer(b"\0" + joined(paths, "\0") + b"\0\0", np.uint8)
    edges = np.flatnonzero((text[:-1] == 0) | (text[:-1] == _SLASH))
    if np.count_nonzero(text[edges] == 0) != len(paths) + 1:
        return True
    lengths, begins = np.diff(edges) - 1, edges[:-1] + 1
    dots = (text[begins] == _DOT) & ((lengths == 1) | ((lengths == 2) & (text[begins + 1] == _DOT)))
    return bool(np.any(dots | (lengths == 0) | (lengths > _LONGEST_NAME_BYTES)))
