"""Reads items of one checkpoint, each byte checked first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

import torch

from sgpu.checkpoint.format import checksum, values
from sgpu.checkpoint.format.manifest import Item
from sgpu.checkpoint.format.metadata_pickle import Box, Chunk, Place, TensorInfo
from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.restoring.sources import Region, Sources
from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import CheckpointMismatchError

Key = tuple[str, Box | None]
_Thing = TypeVar("_Thing")
PIECE_BYTES = 256 * 1024  # stays in the cache between reading and checking


class ItemReader:
    """Reads from the files of a checkpoint, or from memory that holds them.

    Whatever is loaded is checked on the way. `verify` what goes into live tensors before the first of them is loaded:
    then nothing is overwritten by a checkpoint that turns out to be damaged.

    Args:
        store: where the checkpoint is.
        opened: which.
        regions: what is taken from memory instead.
        threads: how many read and check at a time.
    """

    def __init__(self, store: Store, opened: Opened, regions: Iterable[Region] = (), *, threads: int = 1) -> None:
        self.threads = threads
        self.opened = opened
        self.sources = Sources(store, opened)
        self.sources.add(regions)
        self._memory_is_checked = False
        self._items: dict[tuple[str, int], Item] = {}
        if opened.manifest is not None:
            for file, entry in opened.manifest.files.items():
                self._items.update({(file, item.offset): item for item in entry.items})
        if opened.finder is not None:
            self._items.update(opened.finder.items)

    def __enter__(self) -> ItemReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.sources.close()

    def verify(self, keys: Iterable[Key]) -> None:
        """Checks every byte of these items.

        Raises:
            CheckpointCorruptError: names the file and the item.
        """
        chosen = set(keys)
        self.fetch(chosen)
        self.together(self._verify, sorted(chosen, key=lambda key: (self.place(key).file, self.place(key).offset)))

    def _verify(self, key: Key) -> None:
        place, item = self.place(key), self.item(key)
        if item is not None:  # of a plain DCP folder there is nothing to compare with
            buffer = memoryview(bytearray(min(PIECE_BYTES, place.size_bytes)))
            self.compare(item, self._sum(place.file, place.offset, place.size_bytes, key[0], buffer), place.file)

    def together(self, action: Callable[[_Thing], None], things: Iterable[_Thing]) -> None:
        """Does it for each, several at a time; raises the first of what they raise, in the order of `things`."""
        if self.threads == 1:
            for thing in things:
                action(thing)
            return
        with ThreadPoolExecutor(self.threads) as pool:
            for _ in pool.map(action, things):
                pass

    def fetch(self, keys: Iterable[Key]) -> None:
        """From a remote store: brings items here, several at a time, before they are asked for one by one."""
        places = map(self.place, keys)
        self.sources.fetch((place.file, place.offset, place.size_bytes) for place in places)

    def memory_is_checked(self) -> None:
        """To be called when every region was checked by its owner: it is then not checked again."""
        self._memory_is_checked = True

    def _sum(self, file: str, offset: int, size: int, name: str, buffer: memoryview, value: int = 0) -> int:
        memory = self.sources.view(file, offset, size)
        if memory is not None:
            return checksum.of(memory, value)
        for start in range(0, size, PIECE_BYTES):
            part = buffer[: min(PIECE_BYTES, size - start)]
            self.sources.read_into(file, offset + start, part, name)
            value = checksum.of(part, value)
        return value

    def compare(self, item: Item, value: int, file: str) -> None:
        """Raises CheckpointCorruptError unless this is the item's checksum."""
        if value != item.crc32c:
            raise self.sources.damaged(file, item.name, "its bytes are not those that were written")

    def verify_file(self, file: str) -> bytes:
        """A whole small file, checked."""
        content = self.sources.whole(file)
        manifest = self.opened.manifest
        if manifest is not None:
            entry = manifest.files.get(file)
            if entry is None:
                raise self.sources.damaged(file, file, "the manifest does not know it")
            if len(content) != entry.size_bytes or checksum.of(content) != entry.crc32c:
                raise self.sources.damaged(file, file, "its bytes are not those that were written")
        return content

    def read(self, key: Key) -> bytes:
        """The raw bytes of an item."""
        place = self.place(key)
        content = bytearray(place.size_bytes)
        self.sources.read_into(place.file, place.offset, memoryview(content), key[0])
        return bytes(content)

    def load(self, name: str, chunk: Chunk, start: Sequence[int], target: torch.Tensor) -> None:
        """Fills `target` with the part of a chunk that begins at `start` (relative to the chunk)."""
        key = (name, chunk.offsets)
        place, item = self.place(key), self.item(key)
        whole = tuple(target.shape) == chunk.sizes
        straight = whole and target.device.type == "cpu" and target.is_contiguous()
        if item is not None and item.data_bytes > 0 and straight and self._dtype(name) == target.dtype:
            self._check_data(name, chunk, place, item)
            self._load_straight(name, place, item, target)
            return
        source = self._chunk(name, chunk, place, item)
        for dimension, (first, length) in enumerate(zip(start, target.shape, strict=True)):
            source = source.narrow(dimension, first, length)
        target.detach().copy_(source)

    def _load_straight(self, name: str, place: Place, item: Item, target: torch.Tensor) -> None:
        """Into the tensor, each byte once: from memory, or from the file, checked while it is in the cache."""
        flat = target.detach().reshape(-1).view(torch.uint8)
        memory = self._checked_memory(place.file, item)
        if memory is not None:
            flat.copy_(torch.frombuffer(memory, dtype=torch.uint8))
            return
        after = item.data_offset + item.data_bytes
        buffer = memoryview(bytearray(PIECE_BYTES))
        value = self._sum(place.file, place.offset, item.data_offset - place.offset, name, buffer)
        content = flat.numpy().data
        for start in range(0, item.data_bytes, PIECE_BYTES):
            part = content[start : start + PIECE_BYTES]
            self.sources.read_into(place.file, item.data_offset + start, part, name)
            value = checksum.of(part, value)
        rest = self._sum(place.file, after, place.offset + place.size_bytes - after, name, buffer, value)
        self.compare(item, rest, place.file)

    def _checked_memory(self, file: str, item: Item) -> memoryview | None:
        return self.sources.view(file, item.data_offset, item.data_bytes) if self._memory_is_checked else None

    def place(self, key: Key) -> Place:
        place = self.opened.index.places.get(key)
        if place is None:
            raise self.sources.damaged("", key[0], f"its record of {key[0]} at {key[1]} is missing")
        return place

    def widen(self) -> bool:
        """Learns where more shards lie; False where all are known."""
        new = self.opened.finder.more(self.opened.index) if self.opened.finder is not None else None
        self._items.update(new or {})
        return new is not None

    def tensor(self, name: str) -> TensorInfo:
        return self.opened.index.tensors[name]

    def _chunk(self, name: str, chunk: Chunk, place: Place, item: Item | None) -> torch.Tensor:
        if item is None or item.data_bytes == 0:
            return self._stock_chunk(name, chunk, place)
        self._check_data(name, chunk, place, item)
        data = self._checked_memory(place.file, item)
        if data is None:
            content = bytearray(self.read((name, chunk.offsets)))
            self.compare(item, checksum.of(memoryview(content)), place.file)
            start = item.data_offset - place.offset
            data = memoryview(content)[start : start + item.data_bytes]
        return torch.frombuffer(data, dtype=self._dtype(name)).reshape(chunk.sizes)

    def _stock_chunk(self, name: str, chunk: Chunk, place: Place) -> torch.Tensor:
        """A chunk as stock DCP wrote it."""
        loaded = values.from_bytes(self.read((name, chunk.offsets)), self.opened.path, place.file, name)
        if not isinstance(loaded, torch.Tensor) or tuple(loaded.shape) != chunk.sizes:
            raise self.sources.damaged(place.file, name, f"expected a tensor of shape {chunk.sizes}")
        dense = loaded.layout == torch.strided and not loaded.is_quantized
        if dense and loaded.untyped_storage().nbytes() < loaded.numel() * loaded.element_size():
            raise self.sources.damaged(place.file, name, "it has fewer bytes than its elements need")
        return loaded

    def _check_data(self, name: str, chunk: Chunk, place: Place, item: Item) -> None:
        size = math.prod(chunk.sizes) * self._dtype(name).itemsize
        inside = (
            place.offset <= item.data_offset and item.data_offset + item.data_bytes <= place.offset + place.size_bytes
        )
        if item.data_bytes != size or not inside:
            raise self.sources.damaged(
                place.file, name, f"its shape needs {size} bytes, its record says {item.data_bytes}"
            )

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

    def item(self, key: Key) -> Item | None:
        """What the manifest says of it; None for a plain DCP folder, which has none."""
        if self.opened.manifest is None:
            return None
        place = self.place(key)
        item = self._items.get((place.file, place.offset))
        if item is None or item.size_bytes != place.size_bytes:
            raise self.sources.damaged(place.file, key[0], "manifest and commit record do not agree")
        return item


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
