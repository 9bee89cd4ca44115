"""manifest.json: what a checkpoint consists of, with a checksum for each byte. Without torch.

The text starts with its own checksum, over every byte that follows it, so that no flipped bit passes, not even in
white space:

    {"crc32c":"1a2b3c4d","attempt":0,"files":{...},...}
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sgpu.checkpoint.format import checksum, collector, names
from sgpu.contract.errors import CheckpointCorruptError, CheckpointFormatError

FORMAT = "sgpu.checkpoint/1"
WITH_INDEX_FILES = "sgpu.checkpoint/2"  # shards are listed by each rank's own file
_T = TypeVar("_T")
_HEAD = re.compile(rb'\{"crc32c":"([0-9a-f]{8})",')


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One saved object inside a file.

    `offset` and `size_bytes` are the range that a stock reader sees; `data_offset` and `data_bytes` the tensor's own
    bytes inside the file (0 bytes for other objects).
    """

    name: str
    offset: int
    size_bytes: int
    crc32c: int
    data_offset: int = 0
    data_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    size_bytes: int
    crc32c: int
    items: tuple[Item, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharded:
    """A tensor whose shards are listed by the ranks' own files."""

    dtype: str
    shape: tuple[int, ...]
    shards: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`step` is None for a plain `dcp.save` into a folder whose name says none. `sharded`: see shard_index."""

    step: int | None
    attempt: int
    world_size: int
    files: dict[str, FileEntry]
    created_unix_seconds: float
    versions: dict[str, str] = field(default_factory=dict)
    run_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    sharded: dict[str, Sharded] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())

    def to_bytes(self) -> bytes:
        sharded = {name: [tensor.dtype, tensor.shape, tensor.shards] for name, tensor in self.sharded.items()}
        value = {
            "format": WITH_INDEX_FILES if self.sharded else FORMAT,
            "step": self.step,
            "attempt": self.attempt,
            "world_size": self.world_size,
            "created_unix_seconds": self.created_unix_seconds,
            "versions": self.versions,
            "run_id": self.run_id,
            "metadata": self.metadata,
            **({"sharded": sharded} if sharded else {}),
            "files": {name: file_to_json(entry) for name, entry in sorted(self.files.items())},
        }
        rest = json.dumps(value, separators=(",", ":"), allow_nan=True).encode()[1:]
        return b'{"crc32c":"' + checksum.text(checksum.of(rest)).encode() + b'",' + rest

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> Manifest:
        """Raises CheckpointCorruptError unless every byte is the one written."""
        return _checked(content, where, lambda value: cls._from_json(value, where))

    @classmethod
    def _from_json(cls, value: dict[str, Any], where: str) -> Manifest:
        if value.get("format") not in (FORMAT, WITH_INDEX_FILES):
            _refuse_newer(str(value.get("format")), where)
            raise CheckpointCorruptError(
                f"{where}/{names.MANIFEST}: expected format {FORMAT!r}, found {value.get('format')!r}. "
                "Read it with the version of sgpu that wrote it.",
                path=where,
                file=names.MANIFEST,
            )
        return cls(
            step=value["step"],
            attempt=value["attempt"],
            world_size=value["world_size"],
            created_unix_seconds=value["created_unix_seconds"],
            versions=value["versions"],
            run_id=value["run_id"],
            metadata=value["metadata"],
            sharded={
                name: Sharded(dtype=dtype, shape=tuple(shape), shards=shards)
                for name, (dtype, shape, shards) in value.get("sharded", {}).items()
            },
            files={name: file_from_json(entry) for name, entry in value["files"].items()},
        )


def tensor_bytes(content: bytes, where: str) -> dict[str, int]:
    """Name -> bytes, of a manifest's text; it knows no tensor without bytes. A third of the work of `from_bytes`.

    Raises:
        CheckpointCorruptError: as `Manifest.from_bytes`.
    """
    return _checked(content, where, _tensor_bytes)


def _tensor_bytes(value: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in value["files"].values():
        for name, _, _, _, _, data_bytes in entry.get("items", ()):
            if _count(data_bytes):
                found[name] = found.get(name, 0) + data_bytes
    return found


def _checked(content: bytes, where: str, read: Callable[[Any], _T]) -> _T:
    head = _HEAD.match(content)
    if head is None or checksum.text(checksum.of(content[head.end() :])).encode() != head[1]:
        raise CheckpointCorruptError(
            f"{where}/{names.MANIFEST}: its checksum does not fit its content; the checkpoint is damaged. "
            "Use another checkpoint.",
            path=where,
            file=names.MANIFEST,
        )
    try:
        with collector.paused():
            return read(json.loads(content))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(
            f"{where}/{names.MANIFEST} is not what sgpu writes, although its checksum fits "
            f"({type(error).__name__}: {error}). Use another checkpoint.",
            path=where,
            file=names.MANIFEST,
        ) from error


def _refuse_newer(found: str, where: str) -> None:
    known, number = WITH_INDEX_FILES.split("/"), found.rpartition("/")[2]
    if found.startswith(f"{known[0]}/") and number.isdecimal() and int(number) > int(known[1]):
        raise CheckpointFormatError(
            f"{where} was written in the format {found!r}, by a newer sgpu; this one knows {WITH_INDEX_FILES!r}. "
            "Load it with the version that wrote it (pip install --upgrade sgpu); it was left as it is.",
            path=where,
            file=names.MANIFEST,
            found=found,
            known=WITH_INDEX_FILES,
            missing=[],
            unexpected=[],
            different=[found],
        )


def file_to_json(entry: FileEntry) -> dict[str, Any]:
    value: dict[str, Any] = {"bytes": entry.size_bytes, "crc32c": checksum.text(entry.crc32c)}
    if entry.items:
        value["items"] = [
            [item.name, item.offset, item.size_bytes, checksum.text(item.crc32c), item.data_offset, item.data_bytes]
            for item in entry.items
        ]
    return value


def file_from_json(value: dict[str, Any]) -> FileEntry:
    items = tuple(
        Item(
            name=name, offset=_count(offset), size_bytes=_count(size), crc32c=int(crc, 16), data_offset=_count(at),
            data_bytes=_count(data),
        )
        for name, offset, size, crc, at, data in value.get("items", ())
    )  # fmt: skip
    return FileEntry(size_bytes=_count(value["bytes"]), crc32c=int(value["crc32c"], 16), items=items)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a number of bytes, found {str(value)[:40]!r}")
    return value
