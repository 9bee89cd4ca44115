"""Writes `.metadata`, the pickle that stock DCP reads, without torch: the helper process commits too.

The counterpart of metadata_pickle. It says what pickling torch's own `Metadata` says (a test compares the two), in
opcodes of pickle's protocol 4.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Mapping

from sgpu.checkpoint.format.metadata_pickle import OUR_SAVE_ID, Box, CheckpointIndex, Chunk, Place, TensorInfo

DCP_VERSION = "1.0.0"
_META = "torch.distributed.checkpoint.metadata"
_FILES = "torch.distributed.checkpoint.filesystem"
_Write = Callable[[], None]


class _Opcodes:
    """The few values that occur. Texts and classes that come again are written once."""

    def __init__(self) -> None:
        self.out = bytearray(pickle.PROTO + b"\x04")
        self._memo: dict[object, bytes] = {}

    def _once(self, key: object, write: _Write) -> None:
        known = self._memo.get(key)
        if known is not None:
            self.out += known
            return
        write()
        index = len(self._memo)
        wide = struct.pack("<I", index)
        self.out += pickle.BINPUT + wide[:1] if index < 256 else pickle.LONG_BINPUT + wide
        self._memo[key] = pickle.BINGET + wide[:1] if index < 256 else pickle.LONG_BINGET + wide

    def text(self, value: str) -> None:
        content = value.encode("utf-8", "surrogatepass")
        self._once(value, lambda: self._add(pickle.BINUNICODE + struct.pack("<I", len(content)) + content))

    def kind(self, module: str, name: str) -> None:
        def write() -> None:
            self.text(module)
            self.text(name)
            self.out += pickle.STACK_GLOBAL

        self._once((module, name), write)

    def _add(self, code: bytes) -> None:
        self.out += code

    def number(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += pickle.BININT1 + bytes([value])
        elif 0 <= value < 2**31:
            self.out += pickle.BININT + struct.pack("<i", value)
        else:
            content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += pickle.LONG1 + bytes([len(content)]) + content

    def mapping(self, entries: Mapping[str, _Write]) -> None:
        self.out += pickle.EMPTY_DICT + pickle.MARK
        for key, write in entries.items():
            self.text(key)
            write()
        self.out += pickle.SETITEMS

    def record(self, module: str, name: str, fields: Mapping[str, _Write]) -> None:
        """An instance of a dataclass."""
        self.kind(module, name)
        self.out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        if fields:
            self.mapping(fields)
            self.out += pickle.BUILD

    def call(self, module: str, name: str, write: _Write) -> None:
        """A function or class, called with one argument."""
        self.kind(module, name)
        write()
        self.out += pickle.TUPLE1 + pickle.REDUCE

    def nothing(self) -> None:
        self.out += pickle.NONE

    def size(self, box: Box) -> None:
        def numbers() -> None:
            self.out += pickle.MARK
            for value in box:
                self.number(value)
            self.out += pickle.TUPLE

        self.call("torch", "Size", numbers)


def encode(index: CheckpointIndex, where: str) -> bytes:
    """The commit record of a checkpoint at `where` (path or URL)."""
    out = _Opcodes()

    def tensors() -> None:
        out.out += pickle.EMPTY_DICT + pickle.MARK
        for name, info in index.tensors.items():
            out.text(name)
            _tensor(out, info)
        for name in sorted(index.objects):
            out.text(name)
            out.record(_META, "BytesStorageMetadata", {})
        out.out += pickle.SETITEMS

    def paths() -> None:
        out.out += pickle.EMPTY_DICT + pickle.MARK
        for name in [*index.tensors, *sorted(index.objects)]:
            out.text(name)
            out.text(name)
            out.out += pickle.TUPLE1
        out.out += pickle.SETITEMS

    def places() -> None:
        out.out += pickle.EMPTY_DICT + pickle.MARK
        for key, place in index.places.items():
            _place(out, key, place)
        out.out += pickle.SETITEMS

    out.record(_META, "Metadata", {
        "state_dict_metadata": tensors,
        "planner_data": paths,
        "storage_data": places,
        "storage_meta": lambda: _storage_meta(out, where),
        "version": lambda: out.text(DCP_VERSION),
    })  # fmt: skip
    out.out += pickle.STOP
    return bytes(out.out)


def _storage_meta(out: _Opcodes, where: str) -> None:
    def no_modules() -> None:
        out.out += pickle.EMPTY_LIST

    out.record(_META, "StorageMeta", {
        "checkpoint_id": lambda: out.text(where), "save_id": lambda: out.text(OUR_SAVE_ID), "load_id": out.nothing,
        "modules": no_modules,
    })  # fmt: skip


def _tensor(out: _Opcodes, info: TensorInfo) -> None:
    def properties() -> None:
        out.kind(_META, "TensorProperties")
        out.out += pickle.EMPTY_TUPLE + pickle.NEWOBJ + pickle.MARK
        out.kind("torch", info.dtype)
        out.call("torch.serialization", "_get_layout", lambda: out.text("torch.strided"))
        out.out += pickle.NEWFALSE  # requires_grad
        out.call(_META, "_MEM_FORMAT_ENCODING", lambda: out.number(0))
        out.out += pickle.NEWFALSE + pickle.TUPLE + pickle.BUILD  # not pinned

    def chunks() -> None:
        out.out += pickle.EMPTY_LIST + pickle.MARK
        for chunk in info.chunks:
            _chunk(out, chunk)
        out.out += pickle.APPENDS

    out.record(_META, "TensorStorageMetadata", {
        "properties": properties, "size": lambda: out.size(info.shape), "chunks": chunks,
    })  # fmt: skip


def _chunk(out: _Opcodes, chunk: Chunk) -> None:
    out.record(_META, "ChunkStorageMetadata", {
        "offsets": lambda: out.size(chunk.offsets), "sizes": lambda: out.size(chunk.sizes),
    })  # fmt: skip


def _place(out: _Opcodes, key: tuple[str, Box | None], place: Place) -> None:
    name, offsets = key
    out.record(_META, "MetadataIndex", {
        "fqn": lambda: out.text(name), "offset": out.nothing if offsets is None else lambda: out.size(offsets),
        "index": out.nothing,
    })  # fmt: skip
    out.record(_FILES, "_StorageInfo", {
        "relative_path": lambda: out.text(place.file), "offset": lambda: out.number(place.offset),
        "length": lambda: out.number(place.size_bytes),
    })  # fmt: skip
