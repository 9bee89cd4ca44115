"""State that is not tensors: what may be in it, and its form on disk.

On disk it is what `torch.load(weights_only=True)` reads with no list of its own: plain containers, numbers, text,
bytes and tensors. NumPy arrays and the like become dictionaries under the key `__sgpu__`. What cannot be kept is
refused when it is saved, not found missing when it is loaded.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from sgpu.checkpoint.format import archive
from sgpu.contract.errors import CheckpointCorruptError, CheckpointSaveError, UnsafeCheckpointError

MARK = "__sgpu__"
_PLAIN = (bool, int, float, complex, str, bytes)
_TORCH_PLAIN = (torch.dtype, torch.device)
OnTensor = Callable[[tuple[str | int, ...], torch.Tensor], Any]
Path = tuple[str | int, ...]


def keep_tensor(_path: Path, tensor: torch.Tensor) -> torch.Tensor:
    """Tensors stay inside the value, as copies of just their own elements."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def tensor_reference(name: str) -> dict[str, str]:
    return {MARK: "tensor", "name": name}


def encode(value: Any, on_tensor: OnTensor, path: Path = ()) -> Any:
    """Plain form of `value`, sharing nothing that can change; each tensor is replaced by what `on_tensor` returns.

    Raises:
        CheckpointSaveError: something in it cannot be kept; names the place and the type.
    """
    if value is None or (type(value) in _PLAIN) or isinstance(value, _TORCH_PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return on_tensor(path, value)
    if isinstance(value, np.ndarray):
        return _encode_array(value, path)
    if isinstance(value, np.generic):
        return {MARK: "scalar", "array": _encode_array(np.asarray(value), path)}
    if isinstance(value, torch.Size):
        return {MARK: "size", "items": list(value)}
    return _encode_container(value, on_tensor, path)


def _encode_container(value: Any, on_tensor: OnTensor, path: Path) -> Any:
    kind = type(value)
    if kind in (dict, OrderedDict, defaultdict):  # a defaultdict comes back as a dict: its factory is code
        if MARK in value:
            raise _refused(path, f"the key {MARK!r}, which is kept for sgpu's own use")
        items = {_key(key, path): encode(item, on_tensor, (*path, key)) for key, item in value.items()}
        return OrderedDict(items) if kind is OrderedDict else items
    if kind in (list, tuple):
        parts = [encode(item, on_tensor, (*path, index)) for index, item in enumerate(value)]
        return parts if kind is list else tuple(parts)
    if kind is Counter:
        return {MARK: "counter", "items": {_key(key, path): count for key, count in value.items()}}
    if kind is deque:
        parts = [encode(item, on_tensor, (*path, index)) for index, item in enumerate(value)]
        return {MARK: "deque", "items": parts, "maxlen": value.maxlen}
    if kind in (set, frozenset):
        parts = [encode(item, on_tensor, path) for item in value]
        return {MARK: kind.__name__, "items": sorted(parts, key=repr)}
    raise _refused(path, f"a {kind.__module__}.{kind.__qualname__}")


def _key(key: Any, path: Path) -> Any:
    if type(key) in (str, int, bool, float, bytes) or key is None:
        return key
    if type(key) is tuple:
        return tuple(_key(part, path) for part in key)
    raise _refused(path, f"a key of type {type(key).__module__}.{type(key).__qualname__}")


def _encode_array(array: np.ndarray[Any, Any], path: Path) -> dict[str, Any]:
    if array.dtype.hasobject or array.dtype.names is not None:
        raise _refused(path, f"a NumPy array of dtype {array.dtype}")
    return {MARK: "array", "dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def _refused(path: Path, what: str) -> CheckpointSaveError:
    where = ".".join(map(str, path)) or "the state"
    return CheckpointSaveError(
        f"{where} holds {what}, which a checkpoint cannot keep. Numbers, text, bytes, tensors, NumPy arrays, and "
        "lists, tuples, sets and dictionaries of these can be kept; let state_dict() return such values.",
        tensor=where,
        unrecoverable=True,
    )


def decode(value: Any, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, dict):
        if MARK in value:
            return _decode_marked(value, tensor_of)
        items = {key: decode(item, tensor_of) for key, item in value.items()}
        return OrderedDict(items) if isinstance(value, OrderedDict) else items
    if type(value) in (list, tuple):
        parts = [decode(item, tensor_of) for item in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _decode_marked(value: dict[str, Any], tensor_of: Callable[[str], torch.Tensor]) -> Any:
    kind = value[MARK]
    if kind == "tensor":
        return tensor_of(value["name"])
    if kind == "array":
        return np.frombuffer(value["data"], dtype=np.dtype(value["dtype"])).reshape(value["shape"]).copy()
    if kind == "scalar":
        return decode(value["array"], tensor_of)[()]
    if kind == "size":
        return torch.Size(value["items"])
    if kind == "counter":
        return Counter(value["items"])
    items = [decode(item, tensor_of) for item in value["items"]]
    if kind == "deque":
        return deque(items, maxlen=value["maxlen"])
    return set(items) if kind == "set" else frozenset(items)


def to_bytes(encoded: Any) -> bytes:
    file = io.BytesIO()
    torch.save(encoded, file)
    return file.getvalue()


def from_bytes(content: bytes | memoryview, where: str, file: str, name: str) -> Any:
    """What `to_bytes` was given; runs no code of the file.

    Raises:
        UnsafeCheckpointError: it asks for more than plain values.
        CheckpointCorruptError: it cannot be read.
    """
    try:
        archive.check(content)
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"{where}: {name} in {file} holds more than plain values and tensors; nothing of it was run "
            f"({str(error).splitlines()[0]}). Do not load it unless you know who wrote it.",
            path=where,
            file=file,
            name=name,
        ) from error
    except (
        RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, OSError, MemoryError, OverflowError,
    ) as error:  # fmt: skip
        raise CheckpointCorruptError(
            f"{where} is damaged: {name} in {file} cannot be read ({type(error).__name__}: {error}). "
            "Use another checkpoint.",
            path=where,
            file=file,
            tensor=name,
        ) from error
