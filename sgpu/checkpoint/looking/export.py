"""A checkpoint's tensors for other tools: one file, or a folder as Hugging Face's libraries lay it out."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from sgpu.checkpoint.format import dtypes
from sgpu.checkpoint.format.envelope import bytes_of
from sgpu.checkpoint.format.metadata_pickle import Chunk
from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.looking import safetensors_file
from sgpu.checkpoint.looking.safetensors_file import Entry
from sgpu.checkpoint.restoring.reading import ItemReader
from sgpu.checkpoint.stores.store import Store
from sgpu.contract import atomic
from sgpu.contract.errors import InputError

FORMATS = ("safetensors", "torch", "hf")
Rename = Mapping[str, str] | Callable[[str], str | None]
_INPUT_EMBEDDING = re.compile(r"embed|wte|shared|tok")


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is exported, and how.

    Attributes:
        format: "safetensors", "torch": one file with all tensors. "hf": a folder with one part of the state.
        part: only the tensors of this entry of `state`, without its name before theirs. None: all; for "hf" "model".
        rename: from a tensor's name to that in the export. A mapping of regular expressions to replacements, applied
            in order; or a function, where None leaves the tensor out.
        config: for "hf": the content of config.json, or its path.
        shard_bytes: for "hf": no file holds more, but for a larger tensor alone.
    """

    format: str = "safetensors"
    part: str | None = None
    rename: Rename = field(default_factory=dict)
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None
    shard_bytes: int = 5 * 10**9

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise InputError(f"format must be one of {', '.join(FORMATS)}; found {self.format!r}")
        if isinstance(self.shard_bytes, bool) or not isinstance(self.shard_bytes, int) or self.shard_bytes < 1:
            raise InputError(f"shard_bytes must be a whole number above 0; found {self.shard_bytes!r}")
        if self.config is not None and self.format != "hf":
            raise InputError('config is for format="hf" only')


def export(store: Store, opened: Opened, path: str, wanted: Wanted) -> str:
    """Writes what is wanted to a new `path`, each byte checked first; nothing is there until all is."""
    target = pathlib.Path(path)
    if target.exists():
        raise InputError(
            f"{target} exists already; give the name of a new {'folder' if wanted.format == 'hf' else 'file'}."
        )
    names = _names(opened, wanted)
    with ItemReader(store, opened) as reader, _aside(target) as aside:
        if wanted.format == "torch":
            torch.save({new: load_tensor(reader, old) for new, old in names.items()}, aside)
        elif wanted.format == "safetensors":
            _write(reader, aside, names)
        else:
            _write_folder(reader, aside, _untied(opened, names), wanted)
    return str(target)


@contextlib.contextmanager
def _aside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield aside
        os.replace(aside, target)
        atomic.sync_folder(target.parent)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside)
        aside.unlink(missing_ok=True)


def _names(opened: Opened, wanted: Wanted) -> dict[str, str]:
    """Name in the export -> name in the checkpoint."""
    part = "model" if wanted.part is None and wanted.format == "hf" else wanted.part
    prefix = "" if part is None else f"{part}."
    found: dict[str, str] = {}
    for old in sorted(opened.index.tensors):
        new = _renamed(old.removeprefix(prefix), wanted.rename) if old.startswith(prefix) else None
        if new is None:
            continue
        if new in found:
            raise InputError(f"rename gives {new!r} to both {found[new]} and {old}")
        found[new] = old
    if not found:
        parts = sorted({name.partition(".")[0] for name in opened.index.tensors})
        raise InputError(f"{opened.path}: nothing to export: expected tensors of part {part!r}; it has parts {parts}")
    return found


def _renamed(name: str, rename: Rename) -> str | None:
    if callable(rename):
        return rename(name)
    for pattern, replacement in rename.items():
        name = re.sub(pattern, replacement, name)
    return name


def _untied(opened: Opened, names: dict[str, str]) -> dict[str, str]:
    """One name of each tensor that has several, as these libraries expect: of an embedding, that of the input."""
    same: dict[frozenset[tuple[str, int]], list[str]] = {}
    for new, old in names.items():
        places = (opened.index.places[(old, chunk.offsets)] for chunk in opened.index.tensors[old].chunks)
        same.setdefault(frozenset((place.file, place.offset) for place in places) or frozenset({(new, 0)}), []).append(
            new
        )
    kept = {min(tied, key=lambda new: (_INPUT_EMBEDDING.search(new) is None, new)) for tied in same.values()}
    return {new: old for new, old in names.items() if new in kept}


def load_tensor(reader: ItemReader, name: str) -> torch.Tensor:
    """A whole tensor in host memory."""
    info = reader.tensor(name)
    tensor = torch.empty(info.shape, dtype=dtypes.find(info.dtype, name, reader.opened.path))
    for chunk in info.chunks:
        reader.load(name, chunk, (0,) * len(chunk.sizes), _part(tensor, chunk))
    return tensor


def _part(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def _entry(reader: ItemReader, new: str, old: str) -> Entry:
    info = reader.tensor(old)
    size = math.prod(info.shape) * dtypes.find(info.dtype, old, reader.opened.path).itemsize
    return Entry(name=new, dtype=info.dtype, shape=info.shape, size_bytes=size)


def _write(reader: ItemReader, path: pathlib.Path, names: Mapping[str, str]) -> None:
    entries = [_entry(reader, new, old) for new, old in names.items()]
    safetensors_file.write(path, entries, lambda new: bytes_of(load_tensor(reader, names[new])), {})


def _write_folder(reader: ItemReader, folder: pathlib.Path, names: Mapping[str, str], wanted: Wanted) -> None:
    folder.mkdir()
    if wanted.config is not None:
        (folder / "config.json").write_text(_config(wanted.config))
    files: list[list[str]] = [[]]
    total = held = 0
    for new, old in names.items():
        size = _entry(reader, new, old).size_bytes
        if files[-1] and held + size > wanted.shard_bytes:
            files.append([])
            held = 0
        files[-1].append(new)
        held += size
        total += size
    if len(files) == 1:
        _write(reader, folder / "model.safetensors", names)
        return
    placed = {}
    for number, inside in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write(reader, folder / file, {new: names[new] for new in inside})
        placed.update(dict.fromkeys(inside, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _config(config: Mapping[str, Any] | str | os.PathLike[str]) -> str:
    if isinstance(config, Mapping):
        return json.dumps(dict(config), indent=2) + "\n"
    text = pathlib.Path(config).read_text()
    try:
        json.loads(text)
    except ValueError as error:
        raise InputError(f"config: {os.fspath(config)} is not JSON: {error}") from error
    return text
