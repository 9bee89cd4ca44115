"""What is in a volume, fixed for a run: sorted by path, one file, memory-mapped by every process of the node."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgpu.contract import atomic
from sgpu.contract.errors import VolumeError
from sgpu.data.volumes.entry import Entry, Volume
from sgpu.data.volumes.finding import with_offsets

_MAGIC = b"SGPULIST"
_ALIGN = 64
_DIGEST_BYTES = 16
_KEPT = 16
_KEPT_POINTERS = 64
_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()  # os.fsdecode without its calls


class Listing:
    """The files of a volume, by number.

    Attributes:
        id: hash of all names, sizes and versions.
        sizes: int64 [files], bytes.
        stamps: int64 [files], see `Entry.stamp`.
        commit: see `Entry.commit`.
    """

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file
        with file.open("rb") as opened:
            if opened.read(len(_MAGIC)) != _MAGIC:
                raise VolumeError(f"{file} is not a listing; remove it", url=str(file))
            head_bytes = int.from_bytes(opened.read(8), "little")
            head = json.loads(opened.read(head_bytes))
        self.id: str = head["id"]
        self.url: str = head["url"]
        self.total_bytes: int = head["total_bytes"]
        self.commit: str = head.get("commit", "")
        count, at = head["files"], _up(len(_MAGIC) + 8 + head_bytes)
        # as plain arrays: indexing a memmap object costs three times as much
        self._offsets, self.sizes, self.stamps = (
            _mapped(file, np.int64, at + place * _column_bytes(count), (count + (place == 0),)) for place in range(3)
        )
        at += 3 * _column_bytes(count)
        self._digests: npt.NDArray[np.uint8] | None = None
        if head.get("digests"):
            self._digests = _mapped(file, np.uint8, at, (count, _DIGEST_BYTES))
            at += _up(count * _DIGEST_BYTES)
        self._etags: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]] | None = None
        if head.get("etags_bytes"):
            ends = _mapped(file, np.int64, at, (count + 1,))
            at += _column_bytes(count)
            self._etags = ends, _mapped(file, np.uint8, at, (head["etags_bytes"],))
            at += _up(head["etags_bytes"])
        self._names = memoryview(_mapped(file, np.uint8, at, (max(1, head["names_bytes"]),)))
        # for one number at a time, which an array gives as an object of its own kind
        self._begins: memoryview[int] = memoryview(self._offsets)
        self._sizes: memoryview[int] = memoryview(self.sizes)
        self._stamps: memoryview[int] = memoryview(self.stamps)

    def __len__(self) -> int:
        return len(self.sizes)

    def path(self, number: int) -> str:
        return str(self._names[self._begins[number] : self._begins[number + 1]], _ENCODING, _ERRORS)

    def version(self, number: int) -> tuple[int, int]:
        """Size and stamp of a file."""
        return self._sizes[number], self._stamps[number]

    def entry(self, number: int) -> Entry:
        digest = b"" if self._digests is None else self._digests[number].tobytes()
        told = digest if any(digest) else b""
        return Entry(self.path(number), *self.version(number), told, self.etag(number), self.commit)

    def etag(self, number: int) -> str:
        """As the store told it; empty where it told none."""
        if self._etags is None:
            return ""
        offsets, texts = self._etags
        return texts[offsets[number] : offsets[number + 1]].tobytes().decode()

    def find(self, path: str) -> int | None:
        """The number of a file, or None where the listing lacks it."""
        wanted, low, high = os.fsencode(path), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if os.fsencode(self.path(middle)) < wanted:
                low = middle + 1
            else:
                high = middle
        return low if low < len(self) and self.path(low) == path else None

    def entries(self) -> Iterator[Entry]:
        return map(self.entry, range(len(self)))

    def state(self) -> dict[str, Any]:
        """By which another run knows whether it has the same."""
        told = {"id": self.id, "files": len(self), "bytes": self.total_bytes}
        return {**told, "commit": self.commit} if self.commit else told


def way_back(state: dict[str, Any]) -> str:
    """What to do to get the listing of a state again."""
    if "commit" in state:
        return f"Name its commit in the URL, as @{state['commit']} behind the repository"
    return "Restore the files"


def _mapped(file: pathlib.Path, kind: Any, offset: int, shape: tuple[int, ...]) -> Any:
    return np.asarray(np.memmap(file, kind, "r", offset, shape))


def _up(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def _column_bytes(count: int) -> int:
    return _up((count + 1) * 8)


def write_listing(folder: pathlib.Path, url: str, entries: Sequence[Entry]) -> Listing:
    """Stores sorted entries under their id."""
    paths, told_sizes, told_stamps, told_digests, told_etags, commits = zip(*entries, strict=True)
    (names, offsets), (etags, etag_offsets) = with_offsets(paths), with_offsets(told_etags)
    sizes, stamps = np.array(told_sizes, np.int64), np.array(told_stamps, np.int64)
    hashed = hashlib.blake2b(digest_size=16)
    for part in (offsets.tobytes(), sizes.tobytes(), stamps.tobytes(), names, etags):
        hashed.update(part)
    file = folder / f"{hashed.hexdigest()}.listing"
    if not file.exists() or Listing(file).commit != commits[0]:  # an old one may be gone soon
        digests = b"".join(digest or bytes(_DIGEST_BYTES) for digest in told_digests) if any(told_digests) else b""
        head = json.dumps({
            "id": hashed.hexdigest(), "url": url, "files": len(paths), "names_bytes": len(names),
            "total_bytes": int(sizes.sum()), "digests": bool(digests), "etags_bytes": len(etags),
            "commit": commits[0],
        }).encode()  # fmt: skip
        column = _column_bytes(len(paths))
        parts = [(offsets.tobytes(), column), (sizes.tobytes(), column), (stamps.tobytes(), column)]
        parts.append((digests, _up(len(digests))))
        if etags:
            parts += [(etag_offsets.tobytes(), column), (etags, _up(len(etags)))]
        content = bytearray(_MAGIC + len(head).to_bytes(8, "little") + head)
        content.extend(bytes(_up(len(content)) - len(content)))
        for part, room in parts:
            content.extend(part + bytes(room - len(part)))
        content.extend(names)
        atomic.write_bytes(file, bytes(content), durable=False)
    os.utime(file)
    _forget_old(folder)
    return Listing(file)


def _forget_old(folder: pathlib.Path) -> None:
    def age(file: pathlib.Path) -> float:
        try:
            return file.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    for pattern, kept in (("*.listing", _KEPT), ("*.groups.json", _KEPT), ("run-*.json", _KEPT_POINTERS)):
        for file in sorted(folder.glob(pattern), key=age)[:-kept]:
            file.unlink(missing_ok=True)


def shared_listing(
    volume: Volume, entries: Callable[[], list[Entry]], folder: pathlib.Path, scope: str | None
) -> Listing:
    """The listing of this run: made by the first process of the node that asks, read by the others.

    Args:
        entries: lists the volume.
        folder: of this volume and pattern.
        scope: names the run; None: there is no run to share with, list now.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if scope is None:
        return write_listing(folder, volume.url, entries())
    pointer = folder / f"run-{hashlib.blake2b(scope.encode(), digest_size=8).hexdigest()}.json"
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = atomic.read_json(pointer)
        if known is not None and (folder / f"{known['id']}.listing").exists():
            return Listing(folder / f"{known['id']}.listing")
        listing = write_listing(folder, volume.url, entries())
        atomic.write_json(pointer, {"id": listing.id}, durable=False)
        return listing


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What changed between two listings, by path."""

    added: list[str]
    removed: list[str]
    changed: list[str]

    def text(self) -> str:
        told: list[str] = []
        for word, paths in (("added", self.added), ("removed", self.removed), ("changed", self.changed)):
            some = ", ".join(paths[:3]) + (", ..." if len(paths) > 3 else "")
            told.append(f"{len(paths)} {word}" + (f" ({some})" if paths else ""))
        return ", ".join(told)


def difference(before: Listing, after: Listing) -> Difference:
    old: dict[str, Any] = {entry.path: entry.version for entry in before.entries()}
    new: dict[str, Any] = {entry.path: entry.version for entry in after.entries()}
    return Difference(
        added=sorted(new.keys() - old.keys()),
        removed=sorted(old.keys() - new.keys()),
        changed=sorted(path for path in old.keys() & new.keys() if old[path] != new[path]),
    )
