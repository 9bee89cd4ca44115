"""Writes safetensors files, a tensor at a time, so that a model larger than memory can be exported. Without torch.

The form (https://huggingface.co/docs/safetensors): the length of a JSON header, the header, then the tensors' bytes
one after the other, little-endian.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sgpu.checkpoint.format.metadata_pickle import Box
from sgpu.contract.errors import InputError

_NAMES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A tensor to be written. `dtype` without "torch."."""

    name: str
    dtype: str
    shape: Box
    size_bytes: int


def write(
    path: pathlib.Path, entries: Sequence[Entry], content: Callable[[str], memoryview], about: Mapping[str, str]
) -> int:
    """Writes one file and syncs it; gives its bytes.

    Args:
        path: of the new file.
        entries: what goes into it, in this order.
        content: gives a tensor's bytes; asked for one after the other.
        about: short texts, for readers.

    Raises:
        InputError: the form knows no such dtype.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    at = 0
    for entry in entries:
        if entry.dtype not in _NAMES:
            raise InputError(
                f'safetensors has no name for {entry.dtype}, the dtype of {entry.name}; use format="torch".'
            )
        header[entry.name] = {
            "dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [at, at + entry.size_bytes],
        }  # fmt: skip
        at += entry.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            found = content(entry.name)
            if found.nbytes != entry.size_bytes:
                raise ValueError(f"{entry.name}: {entry.size_bytes} bytes were planned, {found.nbytes} were given")
            file.write(found)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()
