"""Batches of everything that can come from a worker; importable, for workers that are fresh interpreters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset


class Pair(NamedTuple):
    one: Any
    other: Any


@dataclass
class Custom:
    tensor: torch.Tensor
    text: str


class Tagged(np.ndarray):
    """A subclass of arrays."""


DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex64, torch.bool, torch.float8_e4m3fn,
)  # fmt: skip
ARRAYS = ("u1", ">i4", "f2", "c16", "M8[s]", "m8[ns]", "S3", "U2", "?", "i4,f8")


def everything(seed: int) -> dict[str, Any]:
    """Of a batch whose parts are plain, each a bit above and below what is small."""
    some = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 2, (5, 7, 11), generator=some).to(dtype) for dtype in DTYPES]
    numbers = [np.arange(seed, seed + 600).astype("i8").view("u1")[: 64 * 60].astype(kind) for kind in ARRAYS[:-1]]
    return {
        "tensors": tensors, "strided": tensors[7].permute(2, 0, 1), "some of it": tensors[4][1:],
        "every second": tensors[8][:, ::2], "expanded": torch.ones(1, 3).expand(4, 3),
        "scalar": torch.tensor(seed), "none": torch.empty(0, 3), "arrays": numbers,
        "fortran": np.asfortranarray(np.arange(600.0).reshape(20, 30)), "every third": np.arange(3000)[::3],
        "records": np.zeros(100, ARRAYS[-1]), "zero-size": np.zeros((0, 4)), "0-d": np.array(seed),
        "number": np.float32(2), "small": np.arange(3), "tagged": np.ones(99).view(Tagged),
        "objects": np.array([{"a": seed}, None], dtype=object),
        "nested": Pair([Custom(tensors[0] + 1, "text")], ({"x": (b"bytes", bytearray(b"more"), seed)}, {1, 2})),
        "bytes": [bytes([seed]) * 100_000, b""], "text": "é" * 70_000, "plain": (None, 1.5, 2**80, slice(1, 2)),
        "dtype": torch.float32, "size": torch.Size([1, 2]),
    }  # fmt: skip


class Everything(Dataset[Any]):
    """Sample i is a whole batch."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> Any:
        return everything(number)


def assert_same(found: Any, told: Any) -> None:
    """Equal, of the same types, in the same form."""
    assert type(found) is type(told)
    if isinstance(told, torch.Tensor):
        assert (found.dtype, found.shape, found.stride()) == (told.dtype, told.shape, told.stride())
        assert (found.requires_grad, found._is_view()) == (False, False)
        assert torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (found, told)))
    elif isinstance(told, np.ndarray):
        assert (found.dtype, found.shape, found.flags.fnc) == (told.dtype, told.shape, told.flags.fnc)
        assert found.flags.writeable
        assert found.tobytes() == told.tobytes() or told.dtype.hasobject
        assert not told.dtype.hasobject or found.tolist() == told.tolist()
    elif isinstance(told, dict):
        assert list(found) == list(told)
        assert_same(list(found.values()), list(told.values()))
    elif isinstance(told, list | tuple):
        assert len(found) == len(told)
        for one, other in zip(found, told, strict=True):
            assert_same(one, other)
    elif isinstance(told, Custom):
        assert_same(vars(found), vars(told))
    else:
        assert found == told
