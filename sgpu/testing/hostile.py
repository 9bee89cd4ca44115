"""Checkpoints that somebody made to run code, or to fill the memory, of whoever reads them."""

from __future__ import annotations

import builtins
import io
import os
import pickle
import struct
import subprocess
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

_META = "torch.distributed.checkpoint.metadata"


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.told = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.told


def _name(module: str, name: str) -> bytes:
    """Protocol 0, written by hand: names that no honest pickler would write."""
    return f"c{module}\n{name}\n".encode()


def _call(module: str, name: str, *arguments: bytes) -> bytes:
    return _name(module, name) + b"(" + b"".join(arguments) + b"tR."


def _text(value: str) -> bytes:
    return f"V{value}\n".encode()


def _short(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _stacked(module: str, name: str, *arguments: bytes) -> bytes:
    """Protocol 4: module and name are values, so they can come from anywhere."""
    return b"\x80\x04" + _short(module) + _short(name) + b"\x93(" + b"".join(arguments) + b"tR."


def runs_code(marker: str) -> dict[str, bytes]:
    """Pickles that make the file `marker`, or do worse, in whoever trusts them."""
    touch = f"touch {marker}"
    return {
        "os.system": pickle.dumps(Calls(os.system, touch)),
        "eval": pickle.dumps(Calls(builtins.eval, f"open({marker!r}, 'w')")),
        "exec": pickle.dumps(Calls(builtins.exec, f"open({marker!r}, 'w')")),
        "popen": pickle.dumps(Calls(subprocess.Popen, ["touch", marker])),
        "open": pickle.dumps(Calls(builtins.open, marker, "w")),
        "import": pickle.dumps(Calls(builtins.__import__, "antigravity")),
        "posix.system": _call("posix", "system", _text(touch)),
        "nt.system": _call("nt", "system", _text(touch)),
        "os.system by protocol 4": _stacked("os", "system", _text(touch)),
        "a dotted name": _stacked("torch", "serialization.os.system", _text(touch)),
        "a dotted name of the allowed module": _stacked(_META, "os.system", _text(touch)),
        "names kept and fetched": b"\x80\x04" + _short("os") + b"\x94" + _short("system") + b"\x940h\x00h\x01\x93("
        + _text(touch) + b"tR.",
        "a name that is no text": b"\x80\x04K\x01" + _short("system") + b"\x93.",
        "a module of another alphabet": b"\x80\x04\x8c\x03\xd0\xbes" + _short("system") + b"\x93.",
        "a name with a null": _stacked("os\0", "system", _text(touch)),
        "torch.load": _call("torch", "load", _text(marker)),
        "torch.storage": _call("torch.storage", "_load_from_bytes", b"C\x01x"),
        "torch.hub": _call("torch.hub", "load", _text("x")),
        "torch.jit": _call("torch.jit", "load", _text(marker)),
        "torch's classes": _call("torch.distributed.checkpoint.filesystem", "FileSystemWriter", _text(marker)),
        "dtype-like": _call("torch", "float_power", _text("x")),
        "getattr chain": _name("builtins", "getattr") + b"(" + _name("builtins", "__import__") + b"(Vos\ntRVsystem\ntR("
        + _text(touch) + b"tR.",
        "getattr of a class": _name("builtins", "getattr") + b"(" + _name(_META, "Metadata") + _text("__init__")
        + b"tR(tR.",
        "copyreg": _call("copyreg", "_reconstructor", _name("builtins", "object")),
        "copyreg by object": b"\x80\x02ccopyreg\n__newobj__\n(" + _name("subprocess", "Popen") + b"tR.",
        "instance": b"(" + _text(touch) + b"ios\nsystem\n.",
        "object": b"(" + _name("os", "system") + _text(touch) + b"o.",
        "new object": b"\x80\x02" + _name("subprocess", "Popen") + b"(" + _text(touch) + b"t\x81.",
        "state of a class": _name(_META, "Metadata") + b"}(Vversion\nVpoisoned\nub.",
        "state of a function": _name("torch.serialization", "_get_layout") + b"}(V__code__\nVx\nub.",
        "code": _call("types", "CodeType"),
        "partial": _call("functools", "partial", _name("os", "system")),
        "attrgetter": _call("operator", "attrgetter", _text("x")),
        "numpy": _call("numpy.core.multiarray", "_reconstruct"),
        "runpy": _call("runpy", "run_path", _text(marker)),
        "ctypes": _call("ctypes", "CDLL", _text("libc.so.6")),
        "pdb": _call("pdb", "run", _text(f"open({marker!r}, 'w')")),
        "pip": _call("pip", "main", b"]Vinstall\na"),
        "persistent id": b"P" + touch.encode() + b"\n.",
        "persistent id by value": b"\x80\x02" + _name("os", "system") + b"Q.",
        "extension": b"\x80\x02\x82\x01.",
        "two pickles": pickle.dumps({}) + pickle.dumps(Calls(os.system, touch)),
    }  # fmt: skip


def fills_memory() -> dict[str, bytes]:
    """Pickles of a few bytes that ask for gigabytes, or keep their reader busy for ever."""
    kept = b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(60))
    listed = b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94" for i in range(60))
    return {
        "memo index": b"\x80\x02}r" + struct.pack("<I", 2**31 - 1) + b".",
        "memo index as text": b"}p4000000000\n.",
        "bytes that are not there": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x.",
        "text that is not there": b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x.",
        "text of 2 GB": b"\x80\x04X" + struct.pack("<I", 2**31 - 1) + b"x.",
        "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**36) + b"x.",
        "bytearray by size": _call("builtins", "bytearray", b"I8589934592\n"),
        "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"}.",
        "long": b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"x.",
        "long of no length": b"\x80\x02\x8b" + struct.pack("<i", -1) + b".",
        "tuples of tuples": b"\x80\x04)\x94" + kept + b".",
        "tuples of tuples as a key": b"\x80\x04)\x94" + kept + b"0}h\x3bK\x01s.",
        "tuples by duplicating": b"\x80\x04K\x01\x85" + b"2\x86" * 60 + b".",
        "tuples of tuples as a size": b"\x80\x04)\x94" + kept + _name("torch", "Size") + b"h\x3b\x85R.",
        "lists of lists": b"\x80\x04]\x94" + listed + b".",
        "lists of lists as a path": b"\x80\x04]\x94" + listed + _name("pathlib", "PosixPath") + b"h\x3b\x85R.",
        "a tuple in a tuple in": b"\x80\x04})" + b"\x85" * 200_000 + b"K\x01s.",
        "a list in a list in": b"\x80\x04" + b"(" * 200_000 + b"l" * 200_000 + b".",
        "no end": b"\x80\x04" + b"}" * 1000,
        "marks": b"\x80\x04" + b"(" * 1000 + b".",
        "an opcode that is none": b"\x80\x04\xff.",
        "nothing on the stack": b"\x80\x04R.",
    }


def archive(pickled: bytes, *, compression: int = zipfile.ZIP_STORED, more: Mapping[str, bytes] | None = None) -> bytes:
    """As `torch.save` writes it, with a pickle of one's own. `more`: other entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as out:
        for name, content in {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n", **(more or {})}.items():
            out.writestr(f"archive/{name}", content)
    return file.getvalue()


def archives(marker: str) -> dict[str, bytes]:
    """What somebody may put where a tensor, an object, or a rank's state is expected."""
    inside = {**runs_code(marker), **fills_memory()}
    zeros = b"\x80\x04X" + struct.pack("<I", 10**8) + bytes(10**8) + b"."
    return {
        **{f"{name}, saved by torch": archive(content) for name, content in inside.items()},
        **{f"{name}, in the old format": content for name, content in inside.items()},
        "what grows when it is unpacked": archive(zeros, compression=zipfile.ZIP_DEFLATED),
        "no archive": b"PK\x03\x04" + bytes(100),
        "two pickles in it": archive(pickle.dumps(1, 2), more={"more/data.pkl": pickle.dumps(2, 2)}),
    }
