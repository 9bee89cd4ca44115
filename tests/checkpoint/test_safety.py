"""A checkpoint from elsewhere is data: nothing in it is run."""

from __future__ import annotations

import pathlib
import pickle

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from sgpu.checkpoint import Checkpointer, CheckpointPolicy, find_latest_valid
from sgpu.checkpoint.format import metadata_pickle
from sgpu.contract.errors import CheckpointCorruptError, CheckpointError


def test_reading_cannot_alter_classes_of_torch() -> None:
    poison = b"ctorch.distributed.checkpoint.metadata\nMetadata\n}(Vversion\nVpoisoned\nub."
    with pytest.raises(CheckpointCorruptError):
        metadata_pickle.parse(poison, "here")
    assert getattr(Metadata, "version", None) is None  # torch 2.6 has none


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"garbage", pickle.dumps({"a": 1}), pickle.dumps(None), b"\x00" * 50]
)
def test_what_is_no_metadata_is_damaged(content: bytes) -> None:
    with pytest.raises(CheckpointCorruptError, match="is not a checkpoint's metadata"):
        metadata_pickle.parse(content, "here")


def test_files_outside_of_the_folder_are_never_named(tmp_path: pathlib.Path) -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

    for file in ("/etc/passwd", "../other", "a/../../b"):
        record = Metadata(
            state_dict_metadata={"x": BytesStorageMetadata()},
            storage_data={MetadataIndex("x"): _StorageInfo(file, 0, 5)},
        )
        with pytest.raises(CheckpointCorruptError, match="inside the checkpoint"):
            metadata_pickle.parse(pickle.dumps(record), "here")


def test_state_that_could_not_be_loaded_safely_is_refused_when_saved(tmp_path: pathlib.Path) -> None:
    with (
        Checkpointer(CheckpointPolicy(str(tmp_path)), {"box": {"deep": [1, {"fn": len}]}}) as checkpointer,
        pytest.raises(CheckpointError, match=r"deep\.1\.fn holds a builtins\.builtin_function_or_method"),
    ):
        checkpointer.save(1)
    assert find_latest_valid(tmp_path) is None
