"""Makes roots of checkpoints, whole by the cheap check, fast: records and manifests are real, tensors are small.

python shelves.py many ROOT COUNT      so many checkpoints of ten tensors
python shelves.py wide ROOT TENSORS    one checkpoint of so many tensors of 4 bytes
"""

from __future__ import annotations

import functools
import io
import pathlib
import pickle
import struct
import sys
import zipfile
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from sgpu.checkpoint.format import checksum, names
from sgpu.checkpoint.format.manifest import FileEntry, Item, Manifest

CREATED = 1_796_000_000.0
SHARD = "__0_0.distcp"


@functools.cache
def archive(values: bytes) -> tuple[bytes, int, int]:
    """What stands for a saved tensor, where its bytes are in it, and its checksum."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as zipped:
        zipped.writestr("archive/data/0", values)
    packed = content.getvalue()
    return packed, packed.index(values) if values else 0, checksum.of(packed)


def tensors_of_a_model(layers: int) -> dict[str, tuple[int, ...]]:
    found = {"model.embed.weight": (8, 4)}
    for layer in range(layers):
        for part in ("attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down"):
            found[f"model.layers.{layer}.{part}.weight"] = (1,)
    return found


def write(
    folder: pathlib.Path,
    shapes: dict[str, tuple[int, ...]],
    *,
    step: int,
    metadata: dict[str, Any] | None = None,
    scale: float = 1.0,
    run_id: str | None = None,
) -> None:
    """A committed checkpoint; the k-th value of a tensor is k times `scale`."""
    folder.mkdir(parents=True)
    entries, storage, items = {}, {}, []
    with (folder / SHARD).open("wb") as shard:
        for name, shape in shapes.items():
            count = 1
            for extent in shape:
                count *= extent
            values = struct.pack(f"<{count}f", *(scale * index for index in range(count)))
            packed, data_at, crc = archive(values)
            offset = shard.tell()
            shard.write(packed)
            size, zeros = torch.Size(shape), torch.Size([0] * len(shape))
            chunk = dcp.ChunkStorageMetadata(offsets=zeros, sizes=size)
            entries[name] = dcp.TensorStorageMetadata(
                properties=dcp.TensorProperties(dtype=torch.float32), size=size, chunks=[chunk]
            )
            storage[dcp.MetadataIndex(name, zeros)] = _StorageInfo(SHARD, offset, len(packed))
            items.append(
                Item(name=name, offset=offset, size_bytes=len(packed), crc32c=crc,
                     data_offset=offset + data_at, data_bytes=len(values))
            )  # fmt: skip
    record = pickle.dumps(
        dcp.Metadata(
            state_dict_metadata=entries,
            storage_data=storage,
            storage_meta=dcp.StorageMeta(save_id="sgpu/1"),
        )
    )
    content = (folder / SHARD).read_bytes()
    manifest = Manifest(
        step=step,
        attempt=0,
        world_size=2,
        files={
            SHARD: FileEntry(size_bytes=len(content), crc32c=checksum.of(content), items=tuple(items)),
            names.METADATA: FileEntry(size_bytes=len(record), crc32c=checksum.of(record)),
        },
        created_unix_seconds=CREATED + step,
        versions={"sgpu": "0.1.0", "torch": torch.__version__, "python": "3.11"},
        run_id=run_id,
        metadata=metadata or {},
    )
    (folder / names.MANIFEST).write_bytes(manifest.to_bytes())
    (folder / names.METADATA).write_bytes(record)


def many(root: pathlib.Path, count: int, *, every: int = 10, run_id: str | None = None) -> None:
    """Checkpoints of steps 10, 20, ...: one is written, the others are it with another manifest."""
    first = root / names.folder_name(every, 0)
    write(first, tensors_of_a_model(2), step=every, run_id=run_id)
    shard, record = (first / SHARD).read_bytes(), (first / names.METADATA).read_bytes()
    manifest = Manifest.from_bytes((first / names.MANIFEST).read_bytes(), str(first))
    for index in range(1, count + 1):
        step = index * every
        own = replace(
            manifest, step=step, created_unix_seconds=CREATED + step,
            metadata={"epoch": index // 100, "batch": step % 1000, "metrics": {"loss": 1 / index}},
        )  # fmt: skip
        folder = root / names.folder_name(step, 0)
        folder.mkdir(exist_ok=True)
        (folder / SHARD).write_bytes(shard)
        (folder / names.MANIFEST).write_bytes(own.to_bytes())
        (folder / names.METADATA).write_bytes(record)


def wide(root: pathlib.Path, count: int) -> None:
    """One checkpoint of about so many tensors, in layers of six."""
    write(root / names.folder_name(100, 0), tensors_of_a_model(count // 6), step=100)


if __name__ == "__main__":
    kind, where, amount = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
    {"many": many, "wide": wide}[kind](where, amount)
