"""The commit record is written without torch, and is what torch would have written."""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from sgpu.checkpoint.format import metadata_pickle, metadata_write


def _tensor(dtype: torch.dtype, shape: list[int], *chunks: tuple[list[int], list[int]]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(offsets=torch.Size(at), sizes=torch.Size(size)) for at, size in chunks],
    )


def test_it_unpickles_to_what_torch_pickles() -> None:
    many = {f"layer.{i}.weight": _tensor(torch.float32, [i], ([0], [i])) for i in range(400)}
    tensors = {
        "split": _tensor(torch.bfloat16, [2, 300], ([0, 0], [2, 3]), ([0, 3], [2, 297])),
        "scalar": _tensor(torch.int64, [], ([], [])),
        "größe": _tensor(torch.float8_e4m3fn, [2**33], ([0], [2**33])),
        **many,
        "objects.__values__": BytesStorageMetadata(),
    }
    places = {
        MetadataIndex("split", [0, 0]): _StorageInfo("__0_0.distcp", 0, 255),
        MetadataIndex("split", [0, 3]): _StorageInfo("__1_0.distcp", 256, 2**40),
        MetadataIndex("scalar", []): _StorageInfo("__0_0.distcp", 2**31, 2**63),
        MetadataIndex("objects.__values__"): _StorageInfo("__0_0.distcp", 65536, 7),
        **{MetadataIndex(name, [0]): _StorageInfo("__0_0.distcp", 1, 2) for name in many},
    }
    expected = Metadata(
        state_dict_metadata=tensors,
        planner_data={name: (name,) for name in tensors},
        storage_data=places,
        storage_meta=StorageMeta(checkpoint_id="/root", save_id=metadata_pickle.OUR_SAVE_ID),
    )
    expected.version = metadata_write.DCP_VERSION
    index = metadata_pickle.parse(pickle.dumps(expected), "/root")
    content = metadata_write.encode(index, "/root")
    found = pickle.loads(content)
    assert found == expected
    assert found.__dict__ == expected.__dict__
    assert metadata_pickle.parse(content, "/root") == index
