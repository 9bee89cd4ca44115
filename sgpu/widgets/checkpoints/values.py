"""What the numbers of one tensor look like, from ranges of its shards. Without torch; no byte of it is ever run."""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sgpu.checkpoint.format import checksum
from sgpu.checkpoint.format.manifest import Item
from sgpu.checkpoint.format.metadata_pickle import Chunk, Place
from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import CheckpointCorruptError, CheckpointNotFoundError, InputError
from sgpu.widgets.checkpoints.tensors import item_bytes

READ_BYTES = 32 * 2**20
BINS = 40
_PIECE_BYTES = 2**20
_KINDS: dict[str, str] = {
    "float64": "<f8", "float32": "<f4", "float16": "<f2", "int64": "<i8", "int32": "<i4", "int16": "<i2", "int8": "i1",
    "uint8": "u1", "uint16": "<u2", "uint32": "<u4", "uint64": "<u8", "bool": "u1", "complex64": "<c8",
    "complex128": "<c16", "bfloat16": "<u2", "float8_e5m2": "u1",
}  # fmt: skip
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Values:
    """The numbers of a tensor. All but `count` are of what was read, without NaN and infinities.

    Attributes:
        count: numbers in the tensor.
        read: numbers that were read; fewer where the tensor is larger than `READ_BYTES`, evenly spread then.
        checked: whether their bytes were compared with the checksums.
        norm: the root of the sum of squares, scaled up where not all was read.
        edges: of the bins, one more than `bins`.
    """

    name: str
    count: int
    read: int
    checked: bool
    low: float
    high: float
    mean: float
    deviation: float
    norm: float
    zeros: int
    nans: int
    infinities: int
    edges: tuple[float, ...]
    bins: tuple[int, ...]


def look_at(store: Store, opened: Opened, name: str) -> Values:
    """Reads a tensor, or pieces of it, by range.

    Raises:
        CheckpointNotFoundError: there is no such tensor.
        CheckpointCorruptError: its bytes are not those that were written.
        InputError: its numbers can't be read without torch.
    """
    info = opened.index.tensors.get(name)
    if info is None:
        raise CheckpointNotFoundError(f"{opened.path} holds no tensor {name!r}", path=opened.path, tensor=name)
    if info.dtype not in _KINDS:
        raise InputError(f"numbers of dtype {info.dtype} are not drawn; load {name} with torch to see them")
    whole = math.prod(info.shape) * item_bytes(info.dtype)
    share = min(1.0, READ_BYTES / whole) if whole else 1.0
    items = _items(opened)
    parts, checked = [], opened.manifest is not None
    for chunk in info.chunks:
        place = opened.index.places.get((name, chunk.offsets))
        if place is None:
            raise _damaged(opened, name, "", "its place is not in the record")
        item = items.get((place.file, place.offset))
        if share == 1.0 or item is None or not item.data_bytes:
            parts.append(_whole(store, opened, name, place, item))
        else:
            checked = False
            parts += _spread(store, opened, place.file, item, share, item_bytes(info.dtype))
        _expect_size(opened, name, chunk, place, info.dtype, parts[-1], share)
    numbers = np.concatenate([_numbers(part, info.dtype) for part in parts]) if parts else np.zeros(0)
    return _describe(name, math.prod(info.shape), numbers, checked)


def _items(opened: Opened) -> dict[tuple[str, int], Item]:
    if opened.manifest is None:
        return {}
    found = {(file, item.offset): item for file, entry in opened.manifest.files.items() for item in entry.items}
    return found | opened.finder.items if opened.finder is not None else found


def _whole(store: Store, opened: Opened, name: str, place: Place, item: Item | None) -> bytes:
    content = store.read(_path(opened, place.file), place.offset, place.size_bytes)
    if len(content) != place.size_bytes:
        raise _damaged(opened, name, place.file, f"it ends after {len(content)} of {place.size_bytes} bytes")
    if item is not None:
        if checksum.of(content) != item.crc32c:
            raise _damaged(opened, name, place.file, "its bytes are not those that were written")
        if item.data_bytes:
            start = item.data_offset - place.offset
            return content[start : start + item.data_bytes]
    return _from_archive(opened, name, place, content)


def _from_archive(opened: Opened, name: str, place: Place, content: bytes) -> bytes:
    """A tensor as stock DCP saves it: an archive with one uncompressed entry for its numbers. Its pickle stays shut."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [entry for entry in archive.infolist() if "/data/" in entry.filename]
            if len(entries) == 1 and entries[0].compress_type == zipfile.ZIP_STORED:
                return archive.read(entries[0])
    except zipfile.BadZipFile as error:
        raise _damaged(opened, name, place.file, f"it is no archive: {error}") from error
    if place.size_bytes and not entries:
        return b""
    raise InputError(f"the numbers of {name} can't be read without torch: it was not saved as one plain archive entry")


def _spread(store: Store, opened: Opened, file: str, item: Item, share: float, width: int) -> Iterator[bytes]:
    """Pieces of a shard, evenly spread, that together are this share of it."""
    pieces = max(1, round(item.data_bytes * share / _PIECE_BYTES))
    length = max(width, int(item.data_bytes * share / pieces) // width * width)
    for piece in range(pieces):  # from the first byte to the last
        start = int(piece * (item.data_bytes - length) / max(1, pieces - 1)) // width * width
        yield store.read(_path(opened, file), item.data_offset + start, min(length, item.data_bytes - start))


def _expect_size(
    opened: Opened, name: str, chunk: Chunk, place: Place, dtype: str, content: bytes, share: float
) -> None:
    expected = math.prod(chunk.sizes) * item_bytes(dtype)
    if share == 1.0 and len(content) != expected:
        if len(content) > expected:
            raise InputError(f"the numbers of {name} can't be read without torch: it is a view of something larger")
        raise _damaged(opened, name, place.file, f"its shape needs {expected} bytes, there are {len(content)}")


def _numbers(content: bytes, dtype: str) -> Numbers:
    raw: Any = np.frombuffer(content, dtype=_KINDS[dtype])
    if dtype == "bfloat16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    elif dtype == "float8_e5m2":
        raw = (raw.astype(np.uint16) << 8).view(np.float16)
    elif dtype.startswith("complex"):
        raw = np.abs(raw)
    found: Numbers = raw.astype(np.float64)
    return found


def _describe(name: str, count: int, numbers: Numbers, checked: bool) -> Values:
    finite = numbers[np.isfinite(numbers)]
    nans = int(np.isnan(numbers).sum())
    bins, edges = _histogram(finite)
    squares = math.fsum(float(np.dot(part, part)) for part in np.array_split(finite, max(1, len(finite) // 2**20)))
    scale = count / len(numbers) if len(numbers) else 1.0
    return Values(
        name=name,
        count=count,
        read=len(numbers),
        checked=checked,
        low=float(finite.min()) if len(finite) else math.nan,
        high=float(finite.max()) if len(finite) else math.nan,
        mean=float(finite.mean()) if len(finite) else math.nan,
        deviation=float(finite.std()) if len(finite) else math.nan,
        norm=math.sqrt(squares * scale),
        zeros=int((finite == 0).sum()),
        nans=nans,
        infinities=len(numbers) - len(finite) - nans,
        edges=edges,
        bins=bins,
    )


def _histogram(finite: Numbers) -> tuple[tuple[int, ...], tuple[float, ...]]:
    if not len(finite):
        return (), ()
    low, high = float(finite.min()), float(finite.max())
    if not math.isfinite(high - low) or np.nextafter(low, high) + (high - low) / BINS <= low:
        return (len(finite),), (low, high)
    bins, edges = np.histogram(finite, bins=BINS if high > low else 1)
    return tuple(map(int, bins)), tuple(map(float, edges))


def _path(opened: Opened, file: str) -> str:
    return f"{opened.folder}/{file}" if opened.folder else file


def _damaged(opened: Opened, name: str, file: str, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{opened.path} is damaged: {name} in {file or 'the commit record'}: {what}. Use another checkpoint.",
        path=opened.path,
        file=file,
        tensor=name,
    )
