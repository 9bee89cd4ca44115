"""Reads items of one checkpoint, each byte checked first."""

from __future__ import annotations

import io
import math
import os
import pathlib
import pickle
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from sgpu.checkpoint import checksum
from sgpu.checkpoint.choose import Opened
from sgpu.checkpoint.manifest import Item
from sgpu.checkpoint.metadata_pickle import Box, Chunk, Place, TensorInfo
from sgpu.checkpoint.storage import CHUNK_BYTES, Store
from sgpu.contract.errors import CheckpointCorruptError, CheckpointMismatchError, UnsafeCheckpointError

Key = tuple[str, Box | None]
PIECE_BYTES = 256 * 1024  # stays in the cache between reading and checking


@dataclass(frozen=True, kw_only=True)
class InMemory:
    """A file of a checkpoint that lies in somebody's staged memory, from `start` on."""

    memory: memoryview
    start: int
    size_bytes: int


class ItemReader:
    """Opens the files of a checkpoint. A remote one is brought to a temporary folder first, a file once.

    Whatever is loaded is checked on the way. `verify` what goes into live tensors before the first of them is loaded:
    then nothing is overwritten by a checkpoint that turns out to be damaged.

    Args:
        store: where the checkpoint is.
        opened: which.
        in_memory: files that are taken from memory instead.
    """

    def __init__(self, store: Store, opened: Opened, in_memory: Mapping[str, InMemory] | None = None) -> None:
        self.opened = opened
        self._store = store
        self._in_memory = dict(in_memory or {})
        self._prefix = f"{opened.folder}/" if opened.folder else ""
        self._descriptors: dict[str, int] = {}
        self._fetched: tempfile.TemporaryDirectory[str] | None = None
        self._items: dict[tuple[str, int], Item] = {}
        if opened.manifest is not None:
            for file, entry in opened.manifest.files.items():
                self._items.update({(file, item.offset): item for item in entry.items})

    def __enter__(self) -> ItemReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        if self._fetched is not None:
            self._fetched.cleanup()
            self._fetched = None

    def verify(self, keys: Iterable[Key]) -> None:
        """Checks every byte of these items.

        Raises:
            CheckpointCorruptError: names the file and the item.
        """
        buffer = memoryview(bytearray(PIECE_BYTES))
        for key in sorted(set(keys), key=lambda key: self._order(key)):
            place = self.place(key)
            item = self._item(key, place)
            if item is None:
                continue  # a plain DCP folder: nothing to compare with
            self._compare(item, self._sum(place.file, place.offset, place.size_bytes, key[0], buffer), place.file)

    def _sum(self, file: str, offset: int, size: int, name: str, buffer: memoryview, value: int = 0) -> int:
        if file in self._in_memory:
            return checksum.of(self._memory(file, offset, size, name), value)
        for start in range(0, size, PIECE_BYTES):
            part = buffer[: min(PIECE_BYTES, size - start)]
            self._read_into(file, offset + start, part, name)
            value = checksum.of(part, value)
        return value

    def _compare(self, item: Item, value: int, file: str) -> None:
        if value != item.crc32c:
            raise self._damaged(file, item.name, "its bytes are not those that were written")

    def verify_file(self, file: str) -> bytes:
        """A whole small file, checked."""
        manifest = self.opened.manifest
        if file in self._in_memory:
            content = bytes(self._memory(file, 0, self._in_memory[file].size_bytes, file))
        else:
            content = self._store.read(self._prefix + file)
        if manifest is not None:
            entry = manifest.files.get(file)
            if entry is None:
                raise self._damaged(file, file, "the manifest does not know it")
            if len(content) != entry.size_bytes or checksum.of(content) != entry.crc32c:
                raise self._damaged(file, file, "its bytes are not those that were written")
        return content

    def read(self, key: Key) -> bytes:
        """The raw bytes of an item."""
        place = self.place(key)
        content = bytearray(place.size_bytes)
        self._read_into(place.file, place.offset, memoryview(content), key[0])
        return bytes(content)

    def load(self, name: str, chunk: Chunk, start: Sequence[int], target: torch.Tensor) -> None:
        """Fills `target` with the part of a chunk that begins at `start` (relative to the chunk)."""
        key = (name, chunk.offsets)
        place = self.place(key)
        item = self._item(key, place)
        whole = tuple(target.shape) == chunk.sizes
        straight = item is not None and item.data_bytes > 0 and whole and target.device.type == "cpu"
        if straight and target.is_contiguous() and self._dtype(name) == target.dtype:
            assert item is not None  # for the type checker: part of `straight`
            self._check_data(name, chunk, place, item)
            self._load_straight(name, place, item, target)
            return
        source = self._chunk(name, chunk, place, item)
        for dimension, (first, length) in enumerate(zip(start, target.shape, strict=True)):
            source = source.narrow(dimension, first, length)
        target.detach().copy_(source)

    def _load_straight(self, name: str, place: Place, item: Item, target: torch.Tensor) -> None:
        """From the file into the tensor, each byte once: it is checked while it is in the cache."""
        flat = target.detach().reshape(-1).view(torch.uint8)
        after = item.data_offset + item.data_bytes
        buffer = memoryview(bytearray(PIECE_BYTES))
        value = self._sum(place.file, place.offset, item.data_offset - place.offset, name, buffer)
        if place.file in self._in_memory:
            memory = self._memory(place.file, item.data_offset, item.data_bytes, name)
            value = checksum.of(memory, value)
            flat.copy_(torch.frombuffer(memory, dtype=torch.uint8))
        else:
            content = flat.numpy().data
            for start in range(0, item.data_bytes, PIECE_BYTES):
                part = content[start : start + PIECE_BYTES]
                self._read_into(place.file, item.data_offset + start, part, name)
                value = checksum.of(part, value)
        self._compare(
            item, self._sum(place.file, after, place.offset + place.size_bytes - after, name, buffer, value), place.file
        )

    def place(self, key: Key) -> Place:
        place = self.opened.index.places.get(key)
        if place is None:
            raise self._damaged("", key[0], f"its record of {key[0]} at {key[1]} is missing")
        return place

    def tensor(self, name: str) -> TensorInfo:
        return self.opened.index.tensors[name]

    def _chunk(self, name: str, chunk: Chunk, place: Place, item: Item | None) -> torch.Tensor:
        if item is not None and item.data_bytes > 0:
            self._check_data(name, chunk, place, item)
            content = bytearray(self.read((name, chunk.offsets)))
            self._compare(item, checksum.of(memoryview(content)), place.file)
            start = item.data_offset - place.offset
            data = memoryview(content)[start : start + item.data_bytes]
            return torch.frombuffer(data, dtype=self._dtype(name)).reshape(chunk.sizes)
        return self._stock_chunk(name, chunk, place)

    def _stock_chunk(self, name: str, chunk: Chunk, place: Place) -> torch.Tensor:
        """A chunk as stock DCP wrote it."""
        content = io.BytesIO(self.read((name, chunk.offsets)))
        try:
            loaded = torch.load(content, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(
                f"{self.opened.path}: {name} in {place.file} holds more than a tensor; nothing of it was run.",
                path=self.opened.path,
                file=place.file,
                name=name,
            ) from error
        except (RuntimeError, EOFError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(place.file, name, f"{type(error).__name__}: {error}") from error
        if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != chunk.sizes:
            raise self._damaged(place.file, name, f"expected a tensor of shape {chunk.sizes}")
        return loaded

    def _check_data(self, name: str, chunk: Chunk, place: Place, item: Item) -> None:
        size = math.prod(chunk.sizes) * self._dtype(name).itemsize
        inside = (
            place.offset <= item.data_offset and item.data_offset + item.data_bytes <= place.offset + place.size_bytes
        )
        if item.data_bytes != size or not inside:
            raise self._damaged(place.file, name, f"its shape needs {size} bytes, its record says {item.data_bytes}")

    def _dtype(self, name: str) -> torch.dtype:
        found = getattr(torch, self.tensor(name).dtype, None)
        if not isinstance(found, torch.dtype):
            raise CheckpointMismatchError(
                f"{self.opened.path}: {name} has dtype {self.tensor(name).dtype}, which this torch "
                f"({torch.__version__}) does not have. Load it with the torch that wrote it.",
                path=self.opened.path,
                tensor=name,
            )
        return found

    def _item(self, key: Key, place: Place) -> Item | None:
        if self.opened.manifest is None:
            return None
        item = self._items.get((place.file, place.offset))
        if item is None or item.size_bytes != place.size_bytes:
            raise self._damaged(place.file, key[0], "manifest and commit record do not agree")
        return item

    def _order(self, key: Key) -> tuple[str, int]:
        place = self.place(key)
        return place.file, place.offset

    def _read_into(self, file: str, offset: int, target: memoryview, name: str) -> None:
        if not target.nbytes:
            return
        if file in self._in_memory:
            target[:] = self._memory(file, offset, target.nbytes, name)
            return
        descriptor = self._open(file)
        done = 0
        while done < target.nbytes:
            count = os.preadv(descriptor, [target[done:]], offset + done)
            if count == 0:
                raise self._damaged(file, name, f"it ends at byte {offset + done}")
            done += count

    def _memory(self, file: str, offset: int, size: int, name: str) -> memoryview:
        found = self._in_memory[file]
        if offset + size > found.size_bytes:
            raise self._damaged(file, name, f"it ends at byte {found.size_bytes}")
        return found.memory[found.start + offset : found.start + offset + size]

    def _open(self, file: str) -> int:
        if file not in self._descriptors:
            try:
                self._descriptors[file] = os.open(self._local_path(file), os.O_RDONLY)
            except FileNotFoundError as error:
                raise self._damaged(file, file, "it is missing") from error
        return self._descriptors[file]

    def _local_path(self, file: str) -> pathlib.Path:
        root = self._store.local_root
        if root is not None:
            return root / (self._prefix + file)
        if self._fetched is None:
            self._fetched = tempfile.TemporaryDirectory(prefix="sgpu-checkpoint-")
        target = pathlib.Path(self._fetched.name) / file.replace("/", "_")
        size = self._store.size(self._prefix + file) or 0
        with target.open("wb") as out:
            for start in range(0, size, 4 * CHUNK_BYTES):
                out.write(self._store.read(self._prefix + file, start, min(4 * CHUNK_BYTES, size - start)))
        return target

    def _damaged(self, file: str, tensor: str, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{self.opened.path} is damaged: {tensor} in {file or 'the commit record'}: {what}. "
            "Use another checkpoint; this one was left as it is.",
            path=self.opened.path,
            file=file,
            tensor=tensor,
        )


def overlap(saved: Chunk, wanted: Chunk) -> tuple[Box, Box, Box] | None:
    """Begin within `saved`, begin within `wanted`, and lengths of what both hold; None where that is nothing."""
    first, second, lengths = [], [], []
    for a, a_size, b, b_size in zip(saved.offsets, saved.sizes, wanted.offsets, wanted.sizes, strict=True):
        begin, end = max(a, b), min(a + a_size, b + b_size)
        if end <= begin:
            return None
        first.append(begin - a)
        second.append(begin - b)
        lengths.append(end - begin)
    return tuple(first), tuple(second), tuple(lengths)
