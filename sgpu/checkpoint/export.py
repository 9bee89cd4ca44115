"""One file with all tensors of a checkpoint, for other tools."""

from __future__ import annotations

import importlib
import os
import pathlib

import torch

from sgpu.checkpoint import dtypes
from sgpu.checkpoint.choose import Opened
from sgpu.checkpoint.metadata_pickle import Chunk
from sgpu.checkpoint.reading import ItemReader
from sgpu.checkpoint.storage import Store
from sgpu.contract.errors import InputError


def load_tensors(store: Store, opened: Opened) -> dict[str, torch.Tensor]:
    """Every tensor, whole, in host memory; each byte checked first."""
    found = {}
    with ItemReader(store, opened) as reader:
        reader.verify(key for key in opened.index.places if key[1] is not None)
        for name, info in opened.index.tensors.items():
            tensor = torch.empty(info.shape, dtype=dtypes.find(info.dtype, name, opened.path))
            for chunk in info.chunks:
                reader.load(name, chunk, (0,) * len(chunk.sizes), _part(tensor, chunk))
            found[name] = tensor
    return found


def _part(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    for dimension, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def export(store: Store, opened: Opened, path: str, kind: str) -> str:
    target = pathlib.Path(path)
    if target.exists():
        raise InputError(f"{target} exists already; give the name of a new file.")
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if kind == "safetensors":
            try:
                safetensors = importlib.import_module("safetensors.torch")
            except ImportError as error:
                raise InputError(
                    'export to safetensors needs the package "safetensors": pip install safetensors; '
                    'or use format="torch".'
                ) from error
            safetensors.save_file(load_tensors(store, opened), str(aside))
        else:
            torch.save(load_tensors(store, opened), aside)
        os.replace(aside, target)
    finally:
        aside.unlink(missing_ok=True)
    return str(target)
