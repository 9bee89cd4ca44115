"""Memory that this process stages into and its helper writes from: one anonymous, shared, reused segment."""

from __future__ import annotations

import mmap
import os

import torch

from sgpu.checkpoint.storage import PAGE_BYTES


class Segment:
    """Has no name, so nothing is left when its processes end. It grows and is never shrunk; its pages stay warm."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("sgpu-checkpoint", os.MFD_CLOEXEC)
        self.size_bytes = 0
        self._map: mmap.mmap | None = None
        self._tensor = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int) -> None:
        """Makes room. Earlier views stay valid, on the same memory."""
        if size_bytes <= self.size_bytes:
            return
        pages = -(-size_bytes // PAGE_BYTES)
        self.size_bytes = pages * PAGE_BYTES
        os.posix_fallocate(self.descriptor, 0, self.size_bytes)
        self._map = mmap.mmap(self.descriptor, self.size_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, start: int, size_bytes: int) -> torch.Tensor:
        return self._tensor[start : start + size_bytes]

    def write(self, start: int, content: bytes) -> None:
        assert self._map is not None
        self._map[start : start + len(content)] = content

    def view(self) -> memoryview:
        assert self._map is not None
        return memoryview(self._map)

    def close(self) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
