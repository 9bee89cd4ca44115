"""Where the bytes of one checkpoint's files come from: its store, or memory that somebody has read them into."""

from __future__ import annotations

import os
import pathlib
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import CheckpointCorruptError

# One ranged request to a remote store, and how many are under way at a time.
BLOCK_BYTES = 8 * 2**20
REQUESTS = 8


@dataclass(frozen=True, kw_only=True)
class Region:
    """Bytes of a checkpoint's file that lie in memory: those from `offset` on. `owner`: the rank that checks them."""

    file: str
    offset: int
    memory: memoryview
    owner: int

    @property
    def end(self) -> int:
        return self.offset + self.memory.nbytes


class Sources:
    """A remote store's files are copied block by block, as they are needed, to a temporary folder."""

    def __init__(self, store: Store, opened: Opened) -> None:
        self._store = store
        self._opened = opened
        self._prefix = f"{opened.folder}/" if opened.folder else ""
        self._opening = threading.Lock()
        self._descriptors: dict[str, int] = {}
        self._copies: tempfile.TemporaryDirectory[str] | None = None
        self._blocks: set[tuple[str, int]] = set()
        self._regions: dict[str, list[Region]] = {}

    @property
    def remote(self) -> bool:
        return self._store.local_root is None

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._regions.clear()
        if self._copies is not None:
            self._copies.cleanup()
            self._copies = None

    def add(self, regions: Iterable[Region]) -> None:
        for region in regions:
            self._regions.setdefault(region.file, []).append(region)
        for known in self._regions.values():
            known.sort(key=lambda region: region.offset)

    def region(self, file: str, offset: int) -> Region | None:
        """The memory that holds this byte."""
        known = self._regions.get(file, [])
        at = bisect_right(known, offset, key=lambda region: region.offset) - 1
        return known[at] if at >= 0 and offset < known[at].end else None

    def view(self, file: str, offset: int, size: int) -> memoryview | None:
        """These bytes without a copy; None where they are not all in one piece of memory."""
        found = self.region(file, offset)
        if found is None or offset + size > found.end:
            return None
        return found.memory[offset - found.offset : offset - found.offset + size]

    def whole(self, file: str) -> bytes:
        known = self._regions.get(file)
        return bytes(known[0].memory) if known else self._store.read(self._prefix + file)

    def read_into(self, file: str, offset: int, target: memoryview, name: str) -> None:
        """Fills `target`, from any thread.

        Raises:
            CheckpointCorruptError: the file ends before; names it, and the item `name`.
        """
        if not target.nbytes:
            return
        memory = self.view(file, offset, target.nbytes)
        if memory is not None:
            target[:] = memory
            return
        if self.remote and target.nbytes >= BLOCK_BYTES:
            content = self._store.read(self._prefix + file, offset, target.nbytes)
            if len(content) != target.nbytes:
                raise self.damaged(file, name, f"it ends at byte {offset + len(content)}")
            target[:] = content
            return
        descriptor = self._open(file)
        self.fetch([(file, offset, target.nbytes)])
        done = 0
        while done < target.nbytes:
            count = os.preadv(descriptor, [target[done:]], offset + done)
            if count == 0:
                raise self.damaged(file, name, f"it ends at byte {offset + done}")
            done += count

    def fetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Of a remote store: brings (file, offset, bytes) here, several requests at a time."""
        if not self.remote:
            return
        wanted = {
            (file, block)
            for file, offset, size in ranges
            if size and self.view(file, offset, size) is None
            for block in range(offset // BLOCK_BYTES, -(-(offset + size) // BLOCK_BYTES))
        } - self._blocks
        if not wanted:
            return
        for file in {file for file, _ in wanted}:
            self._open(file)
        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(self._fetch_block, *zip(*sorted(wanted), strict=True)))
        self._blocks |= wanted

    def _fetch_block(self, file: str, block: int) -> None:
        start = block * BLOCK_BYTES
        os.pwrite(self._descriptors[file], self._store.read(self._prefix + file, start, BLOCK_BYTES), start)

    def _open(self, file: str) -> int:
        with self._opening:
            if file not in self._descriptors:
                try:
                    self._descriptors[file] = self._open_file(file)
                except FileNotFoundError as error:
                    raise self.damaged(file, file, "it is missing") from error
            return self._descriptors[file]

    def _open_file(self, file: str) -> int:
        root = self._store.local_root
        if root is not None:
            return os.open(root / (self._prefix + file), os.O_RDONLY)
        if self._copies is None:
            self._copies = tempfile.TemporaryDirectory(prefix="sgpu-checkpoint-")
        copy = pathlib.Path(self._copies.name) / file.replace("/", "_")
        return os.open(copy, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)

    def damaged(self, file: str, item: str, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{self._opened.path} is damaged: {item} in {file or 'the commit record'}: {what}. "
            "Use another checkpoint; this one was left as it is.",
            path=self._opened.path,
            file=file,
            tensor=item,
        )
