"""What every volume tells of its files, and what it can do with one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from sgpu.contract.errors import ListingChangedError

CHUNK_BYTES = 4 << 20


class Entry(NamedTuple):
    """A file of a volume. (A tuple, since there may be millions while a volume is listed.)

    Attributes:
        path: relative to the volume, "/" between folders.
        stamp: whole microseconds since 1970 of the last change; where the store gives an etag its bits are the part
            below a second. 0 where the store tells nothing. It becomes the modification time of the cached copy.
        digest: MD5 of the content where the store tells it, else empty.
        etag: as the store tells it, without quotes; empty where it tells none.
        commit: of a repository, at which it was listed and is read; the etag is then the SHA-256 of the content, or
            what git names it by. The same for all of a listing. Empty for what has no commits.
    """

    path: str
    size_bytes: int
    stamp: int
    digest: bytes = b""
    etag: str = ""
    commit: str = ""

    @property
    def version(self) -> tuple[int, int, bytes, str]:
        """What tells it from other content: another commit may leave it as it is."""
        return self[1:5]


class Volume(Protocol):
    """Calls come in any order and from any thread or process."""

    url: str

    def entries(self) -> Iterator[Entry]:
        """Every file, in any order."""

    def copy(self, entry: Entry, descriptor: int) -> int | None:
        """Writes the file's bytes to an open file. Raises OSError (worth another try), or a DataError (not).

        Returns:
            Their CRC-32C, where it had all of them in hand.
        """

    def body(self, entry: Entry) -> bytes:
        """All of its bytes, where they fit into memory. Raises as `copy` does, also where fewer came."""

    def read(self, entry: Entry, start: int, stop: int) -> bytes:
        """Some of the file's bytes, `start` to `stop` exclusive. Raises as `copy` does, also where fewer came."""

    def has_folder(self, path: str) -> bool:
        """Whether there is anything below `path`."""

    def direct(self, path: str) -> str | None:
        """A local path of the file itself, where there is one."""


def changed(url: str, entry: Entry, now: str) -> ListingChangedError:
    return ListingChangedError(
        f"{entry.path} in volume {url} changed since the volume was listed: listed with {entry.size_bytes} bytes, "
        f"now {now} or a newer version. Files of a volume must not change under a run; start a new run to read "
        "the new version.",
        url=url, path=entry.path, added=[], removed=[], changed=[entry.path],
    )  # fmt: skip


def write_all(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]
