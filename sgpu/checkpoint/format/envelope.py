"""The bytes around a tensor's own bytes, so that a stock reader (`torch.load` of that range) finds a tensor.

A DCP shard holds each tensor as `torch.save` writes it: a zip archive. Its head and tail depend on shape and dtype
only, so they are made once; the tensor's own bytes are copied between them, once, where they will be written from.
"""

from __future__ import annotations

import math
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from typing import IO

import torch
from torch.serialization import skip_data

ALIGNMENT_BYTES = 64
_LOCAL_HEADER = struct.Struct("<26xHH")


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """`head + data + tail` is what `torch.save` would have written, but for zip's own CRCs (which torch does
    not read) and some zeros at its end."""

    head: bytes
    tail: bytes
    data_bytes: int

    @property
    def size_bytes(self) -> int:
        return len(self.head) + self.data_bytes + len(self.tail)


@lru_cache(maxsize=65536)
def envelope(dtype: torch.dtype, shape: tuple[int, ...]) -> Envelope:
    tensor = torch.empty(shape, dtype=dtype)
    data_bytes = math.prod(shape) * tensor.element_size()
    with tempfile.TemporaryFile() as file:  # sparse: the data is skipped over
        with skip_data():
            torch.save(tensor, file)
        start = _data_start(file)
        file.seek(0)
        head = file.read(start)
        file.seek(start + data_bytes)
        return Envelope(head=head, tail=_padded(file.read(), start + data_bytes), data_bytes=data_bytes)


def _padded(tail: bytes, before_bytes: int) -> bytes:
    """Ends the archive with a comment of zeros, so that the next one, and the data in it, are aligned.

    torch aligns data within an archive. Copying to memory that is not aligned takes nearly twice as long.
    """
    padding = -(before_bytes + len(tail)) % ALIGNMENT_BYTES
    assert tail[-2:] == b"\0\0"  # the archive's comment is empty: its length is the last thing
    return tail[:-2] + padding.to_bytes(2, "little") + bytes(padding)


def _data_start(file: IO[bytes]) -> int:
    with zipfile.ZipFile(file) as archive:
        entry = next(info for info in archive.infolist() if info.filename.endswith("/data/0"))
    file.seek(entry.header_offset)
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return int(entry.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as a one-dimensional uint8 tensor; without a copy where it is contiguous."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor as bytes in host memory."""
    flat = flat_bytes(tensor).cpu()
    return flat.numpy().data if flat.numel() else memoryview(b"")
