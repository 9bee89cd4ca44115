"""One small interface to a place for files. Without torch.

Order of calls: a file is `put` once, whole; it is visible under its name only when all of it is durable. Paths are
relative to the store's root and use "/".
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Protocol

from sgpu.checkpoint.stores import unbuffered

CHUNK_BYTES = 4 * 2**20
Observe = unbuffered.Observe


class Store(Protocol):
    """Where checkpoints are kept. Failures are OSError; an absent file is FileNotFoundError."""

    url: str

    @property
    def local_root(self) -> pathlib.Path | None:
        """The folder, where files can be opened by path; None for a remote store."""

    def names(self, folder: str) -> list[str]:
        """Files and folders directly inside `folder` ("" is the root); empty where there is none."""

    def size(self, path: str) -> int | None:
        """Bytes of a file; None where there is no such file (also where it is a folder)."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each file directly inside `folder`, from one listing; empty where there is none."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes from `offset` on; fewer than `length` where the file ends before."""

    def put(self, path: str, parts: Iterable[memoryview], observe: Observe | None = None) -> int:
        """Makes `path` hold `parts`, whole or not at all, and durable; returns its bytes.

        `observe` sees each piece once, in order, just before it is written.
        """

    def create(self, path: str, content: bytes) -> bool:
        """Puts a file that must not exist yet; False where it does."""

    def delete(self, path: str) -> None:
        """Removes a file; an absent one is fine."""

    def delete_files(self, paths: Sequence[str]) -> None:
        """Removes files of one folder, many at once; absent ones are fine."""

    def delete_folder(self, folder: str) -> None:
        """Removes a folder and all in it; an absent one is fine."""


def pieces(parts: Iterable[memoryview]) -> Iterable[memoryview]:
    """The parts as bytes, cut into chunks."""
    for part in parts:
        flat = part.cast("B") if part.nbytes else part
        for start in range(0, flat.nbytes, CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES]
