"""Reads `.metadata` without running it, and without torch.

`.metadata` is a pickle, and a pickle is a program. Here only the names below may be asked for, and each is a stand-in
made for one reading: nothing of torch is called, nor can its classes be altered. What comes out is checked by type.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NoReturn

from sgpu.checkpoint.format import collector, names, opcodes
from sgpu.contract.errors import CheckpointCorruptError, UnsafeCheckpointError

OUR_SAVE_ID = "sgpu/1"
_META = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_META, name)
    for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo")}  # fmt: skip
_PATHS = {
    (module, name)
    for module in ("pathlib", "pathlib._local")
    for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
}
_DTYPE_PREFIXES = ("float", "bfloat", "int", "uint", "complex", "bool", "double", "half", "long", "short", "bits")
Box = tuple[int, ...]
_MOST = 2**128


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A part of a tensor: where it begins in the whole, and its extent."""

    offsets: Box
    sizes: Box


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """`dtype` without "torch."."""

    dtype: str
    shape: Box
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one item lies."""

    file: str
    offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """`.metadata` as plain data. A place's key is (name, offsets); offsets are None for what is not a tensor."""

    tensors: dict[str, TensorInfo]
    objects: frozenset[str]
    places: dict[tuple[str, Box | None], Place]
    paths: dict[str, tuple[str | int, ...]]
    save_id: str | None
    version: str | None

    @property
    def ours(self) -> bool:
        """Whether a manifest must lie beside it."""
        return (self.save_id or "").startswith(OUR_SAVE_ID)


class _Record:
    """Stands for a dataclass of torch; takes any state, does nothing."""

    __slots__ = ("arguments", "state")

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


def _stand_in(name: str) -> type[_Record]:
    return type(name, (_Record,), {"__slots__": ()})


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content))
        self._where = where
        self._made: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key not in self._made:
            self._made[key] = self._find(module, name)
        return self._made[key]

    def _find(self, module: str, name: str) -> Any:
        key = (module, name)
        if key in _RECORDS:
            return _stand_in(name)
        if key == (_META, "_MEM_FORMAT_ENCODING"):
            return lambda value: f"memory format {int(value)}"
        if key == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 pickles an enum's member
            return lambda _owner, member: f"memory format {_str(member)}"
        if key == ("torch.serialization", "_get_layout"):
            return lambda layout: _str(layout)
        if key == ("torch", "Size"):
            return lambda sizes=(): _box(tuple(sizes))
        if key == ("collections", "OrderedDict"):
            return OrderedDict
        if key in _PATHS:
            return lambda *parts: "/".join(map(_str, parts))
        if module == "torch" and name.startswith(_DTYPE_PREFIXES) and name.isidentifier():
            return f"dtype {name}"
        self._refuse(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        self._refuse("a persistent id")

    def _refuse(self, name: str) -> NoReturn:
        raise UnsafeCheckpointError(
            f"{self._where}/{names.METADATA} asks for {name}, which is not on the list of names that a checkpoint may "
            "hold; nothing of it was run. Do not load this checkpoint unless you know who wrote it.",
            path=self._where,
            file=names.METADATA,
            name=name,
        )


def parse(content: bytes, where: str) -> CheckpointIndex:
    """Reads the bytes of a `.metadata`.

    Raises:
        UnsafeCheckpointError: it asks for a name that is not on the list.
        CheckpointCorruptError: it is not a DCP metadata record.
    """
    try:
        opcodes.check(content)
        with collector.paused():
            return _to_index(_Unpickler(content, where).load())
    except UnsafeCheckpointError:
        raise
    except (
        pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError,
        OverflowError, MemoryError, RecursionError,
    ) as error:  # fmt: skip
        raise CheckpointCorruptError(
            f"{where}/{names.METADATA} is not a checkpoint's metadata ({type(error).__name__}: {error}). "
            "Use another checkpoint.",
            path=where,
            file=names.METADATA,
        ) from error


def _to_index(root: Any) -> CheckpointIndex:
    _expect(_kind(root) == "Metadata", "a Metadata record", root)
    tensors: dict[str, TensorInfo] = {}
    objects = set()
    for name, record in _dict(root.get("state_dict_metadata")).items():
        kind = _kind(record)
        if kind == "TensorStorageMetadata":
            tensors[_str(name)] = _tensor(record)
        else:
            _expect(kind == "BytesStorageMetadata", "a tensor's or an object's record", record)
            objects.add(_str(name))
    places = {}
    for index, record in _dict(root.get("storage_data")).items():
        key = _state(index, "MetadataIndex", "a storage record's index")
        offsets = key.get("offset")
        where = (_str(key.get("fqn")), None if offsets is None else _box(offsets))
        places[where] = _place(_state(record, "_StorageInfo", "a storage record"))
    meta = root.get("storage_meta")
    save_id = meta.get("save_id") if _kind(meta) == "StorageMeta" else None
    version = root.get("version")
    return CheckpointIndex(
        tensors=tensors,
        objects=frozenset(objects),
        places=places,
        paths=_paths(root.get("planner_data")),
        save_id=None if save_id is None else _str(save_id),
        version=None if version is None else _str(version),
    )


def _tensor(record: _Record) -> TensorInfo:
    facts = _state(record, "TensorStorageMetadata", "a tensor's record")
    properties: Any = facts.get("properties")
    chunks: Any = facts.get("chunks")
    _expect(_kind(properties) == "TensorProperties", "a tensor's properties", properties)
    _expect(isinstance(chunks, list), "a list of chunks", chunks)
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) else _dict(state)["dtype"]
    return _info(dtype, facts.get("size"), tuple([_boxes(chunk) for chunk in chunks]))


@functools.lru_cache(maxsize=4096)
def _info(dtype: Any, size: Any, chunks: tuple[tuple[Any, Any], ...]) -> TensorInfo:
    """Tensors of the same dtype, shape and shards are checked once."""
    parts = tuple([Chunk(offsets=_box(offsets), sizes=_box(sizes)) for offsets, sizes in chunks])
    return TensorInfo(dtype=_dtype(dtype), shape=_box(size), chunks=parts)


@functools.lru_cache(maxsize=64)
def _dtype(value: Any) -> str:
    _expect(_str(value).startswith("dtype "), "a dtype", value)
    return str(value).removeprefix("dtype ")


def _boxes(record: Any) -> tuple[Any, Any]:
    facts = _state(record, "ChunkStorageMetadata", "a chunk")
    return facts.get("offsets"), facts.get("sizes")


def _place(facts: dict[Any, Any]) -> Place:
    offset, length, transforms = facts.get("offset"), facts.get("length"), facts.get("transform_descriptors")
    if not (isinstance(offset, int) and isinstance(length, int) and 0 <= offset < _MOST and 0 <= length < _MOST):
        raise ValueError(f"expected an offset and a length, found {_shown(offset)} and {_shown(length)}")
    _expect(not transforms, "data without transforms", transforms)
    return Place(file=_file(facts.get("relative_path")), offset=offset, size_bytes=length)


@functools.lru_cache(maxsize=1024)
def _file(value: Any) -> str:
    file = _str(value)
    inside = not file.startswith("/") and ".." not in file.split("/") and "\\" not in file
    _expect(inside, "a file inside the checkpoint's folder", file)
    return file


def _paths(value: Any) -> dict[str, tuple[str | int, ...]]:
    if not isinstance(value, dict):
        return {}
    return {
        name: tuple(path)
        for name, path in value.items()
        if isinstance(name, str) and isinstance(path, tuple) and all(isinstance(part, (str, int)) for part in path)
    }


def _kind(value: Any) -> str:
    return type(value).__name__ if isinstance(value, _Record) else ""


def _state(value: Any, kind: str, expected: str) -> dict[Any, Any]:
    """What a record of this kind holds."""
    if not (isinstance(value, _Record) and type(value).__name__ == kind and isinstance(value.state, dict)):
        raise ValueError(f"expected {expected}, found {_shown(value)}")
    return value.state


def _expect(ok: bool, expected: str, found: Any) -> None:
    if not ok:
        raise ValueError(f"expected {expected}, found {_shown(found)}")


def _shown(value: Any) -> str:
    """Containers only by their kind: in full, one of them can be longer than the memory."""
    if isinstance(value, str):
        return repr(value[:80])
    short = value is None or (isinstance(value, int) and abs(value) < _MOST)
    return str(value) if short else f"a {type(value).__name__}"


def _dict(value: Any) -> dict[Any, Any]:
    _expect(isinstance(value, dict), "a dictionary", value)
    found: dict[Any, Any] = value
    return found


def _str(value: Any) -> str:
    _expect(isinstance(value, str), "text", value)
    return str(value)


@functools.lru_cache(maxsize=4096)
def _box(value: Any) -> Box:
    """Few shapes are different: each is checked once, and what equals it is it."""
    ok = isinstance(value, tuple) and all(isinstance(part, int) and 0 <= part < _MOST for part in value)
    _expect(ok, "a shape", value)
    return tuple(int(part) for part in value)
