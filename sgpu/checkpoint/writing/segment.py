"""Memory that a trainer stages into and its helper writes from: one anonymous, shared, reused segment. Without torch.

It begins with a page of its own: a mark that tells whether what follows is complete (a trainer that dies while it
stages leaves it unmarked, and nobody takes the half for a whole), and a token that tells it from other segments.
"""

from __future__ import annotations

import mmap
import os
import struct

from sgpu.checkpoint.stores.unbuffered import PAGE_BYTES

HEADER_BYTES = PAGE_BYTES
_MARK = struct.Struct("<Q")
_NAME = "sgpu-checkpoint"
INCOMPLETE = 0


class Segment:
    """Has no name, so nothing is left when all who hold it have ended. It grows, never shrinks; its pages stay warm.

    Args:
        descriptor: an open segment to take over (then this object's to close); None: a new one.
        writable: False: to look at only.

    Attributes:
        token: what its owner wrote there, so that who opens it by its owner's pid can tell that it is the one.
    """

    LINK = f"/memfd:{_NAME}"
    TOKEN_BYTES = 16

    def __init__(self, descriptor: int | None = None, *, writable: bool = True) -> None:
        if descriptor is None:
            descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
            os.ftruncate(descriptor, HEADER_BYTES)
        self.descriptor = descriptor
        self._writable = writable
        self._map = self._mapped()

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            self.close()

    def _mapped(self) -> mmap.mmap:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self._writable else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if self._writable else 0)
        return mmap.mmap(self.descriptor, os.fstat(self.descriptor).st_size, flags=flags, prot=protection)

    @property
    def size_bytes(self) -> int:
        return len(self._map) - HEADER_BYTES

    def reserve(self, size_bytes: int) -> bool:
        """Makes room; tells whether it grew. Earlier views stay valid, on the same memory."""
        if size_bytes <= self.size_bytes:
            return False
        pages = -(-size_bytes // PAGE_BYTES)
        os.posix_fallocate(self.descriptor, 0, HEADER_BYTES + pages * PAGE_BYTES)
        self._map = self._mapped()
        return True

    def view(self) -> memoryview:
        """What is staged; mapped anew where the other side made it grow."""
        if os.fstat(self.descriptor).st_size != len(self._map):
            self._map = self._mapped()
        return memoryview(self._map)[HEADER_BYTES:]

    def write(self, start: int, content: bytes) -> None:
        at = HEADER_BYTES + start
        self._map[at : at + len(content)] = content

    @property
    def mark(self) -> int:
        return int(_MARK.unpack_from(self._map, 0)[0])

    @mark.setter
    def mark(self, value: int) -> None:
        _MARK.pack_into(self._map, 0, value)

    @property
    def token(self) -> bytes:
        return bytes(self._map[_MARK.size : _MARK.size + self.TOKEN_BYTES])

    @token.setter
    def token(self, value: bytes) -> None:
        self._map[_MARK.size : _MARK.size + self.TOKEN_BYTES] = value

    def close(self) -> None:
        """Views may live on; the memory goes when the last of them does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
