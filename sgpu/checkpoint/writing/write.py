"""Writes one rank's staged share. Without torch: this runs in the helper process, or in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sgpu.checkpoint.format.checksum import Span, SpanChecksums
from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import CheckpointSaveError
from sgpu.contract.failpoint import failpoint


@dataclass(frozen=True, kw_only=True)
class FileJob:
    """A file whose bytes lie in the staged memory from `start` on, as spans one after the other."""

    name: str
    start: int
    spans: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return sum(self.spans)


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    name: str
    size_bytes: int
    crc32c: int
    spans: tuple[Span, ...]

    def to_json(self) -> dict[str, Any]:
        spans = [[span.offset, span.size_bytes, span.crc32c] for span in self.spans]
        return {"name": self.name, "bytes": self.size_bytes, "crc32c": self.crc32c, "spans": spans}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> WrittenFile:
        spans = tuple(Span(offset=at, size_bytes=size, crc32c=crc) for at, size, crc in value["spans"])
        return cls(name=value["name"], size_bytes=value["bytes"], crc32c=value["crc32c"], spans=spans)


def write_share(
    store: Store, memory: memoryview, folder: str, rank: int, files: Sequence[FileJob]
) -> list[WrittenFile]:
    """Puts each file, checksummed on the way, and checks what is there afterwards.

    Raises:
        OSError: the store failed.
        CheckpointSaveError: the store holds another number of bytes than was written.
    """
    return [_write_file(store, memory, folder, rank, file) for file in files]


def sums_of(memory: memoryview, files: Sequence[FileJob]) -> list[WrittenFile]:
    """What `write_share` would give, without writing."""
    found = []
    for file in files:
        sums = SpanChecksums(file.spans)
        sums.see(memory[file.start : file.start + file.size_bytes])
        found.append(written_of(file, sums))
    return found


def written_of(file: FileJob, sums: SpanChecksums) -> WrittenFile:
    return WrittenFile(name=file.name, size_bytes=file.size_bytes, crc32c=sums.whole(), spans=tuple(sums.spans()))


def _write_file(store: Store, memory: memoryview, folder: str, rank: int, file: FileJob) -> WrittenFile:
    sums = SpanChecksums(file.spans)
    path = f"{folder}/{file.name}"
    content = memory[file.start : file.start + file.size_bytes]
    store.put(path, [content], _with_failpoint(sums.see, file.size_bytes, rank))
    found = store.size(path)
    if found != file.size_bytes:
        raise CheckpointSaveError(
            f"{store.url}/{path}: {file.size_bytes} bytes were written, {found} are there. Not committed.",
            path=f"{store.url}/{folder}",
            file=file.name,
            rank=rank,
        )
    return written_of(file, sums)


def _with_failpoint(see: Callable[[memoryview], None], size_bytes: int, rank: int) -> Callable[[memoryview], None]:
    seen = 0
    passed = False

    def observe(piece: memoryview) -> None:
        nonlocal seen, passed
        seen += piece.nbytes
        if not passed and 2 * seen >= size_bytes:
            passed = True
            failpoint("checkpoint.shard_half", rank)
        see(piece)

    return observe
