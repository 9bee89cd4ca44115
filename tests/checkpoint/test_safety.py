"""A checkpoint from elsewhere is data: nothing in it is run."""

from __future__ import annotations

import builtins
import io
import os
import pathlib
import pickle
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, VolumeReader, find_latest_valid, metadata_pickle
from sgpu.contract.errors import CheckpointCorruptError, CheckpointError, UnsafeCheckpointError

MARKER = "/tmp/sgpu-test-hostile-pickle-ran"


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.told = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.told


def _global(module: str, name: str, *arguments: bytes) -> bytes:
    """Protocol 0, written by hand: names that no honest pickler would write."""
    return f"c{module}\n{name}\n(".encode() + b"".join(arguments) + b"tR."


def _text(value: str) -> bytes:
    return f"V{value}\n".encode()


HOSTILE = {
    "os.system": pickle.dumps(Calls(os.system, f"touch {MARKER}")),
    "eval": pickle.dumps(Calls(builtins.eval, f"open({MARKER!r}, 'w')")),
    "exec": pickle.dumps(Calls(builtins.exec, f"open({MARKER!r}, 'w')")),
    "popen": pickle.dumps(Calls(subprocess.Popen, ["touch", MARKER])),
    "open": pickle.dumps(Calls(builtins.open, MARKER, "w")),
    "posix.system": _global("posix", "system", _text(f"touch {MARKER}")),
    "nt.system": _global("nt", "system", _text(f"touch {MARKER}")),
    "import": pickle.dumps(Calls(builtins.__import__, "antigravity")),
    "torch.load": pickle.dumps(Calls(torch.load, MARKER)),
    "torch.hub": _global("torch.hub", "load", _text("x")),
    "torch dotted": b"\x80\x04\x8c\x05torch\x8c\x15serialization.os.open\x93.",
    "dtype-like": _global("torch", "float_power", _text("x")),
    "getattr chain": (
        b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(Vos\ntRVsystem\ntR(V" + f"touch {MARKER}".encode() + b"\ntR."
    ),
    "copyreg": _global("copyreg", "_reconstructor", b"cbuiltins\nobject\n"),
    "code": _global("types", "CodeType"),
    "partial": _global("functools", "partial", b"cos\nsystem\n"),
    "attrgetter": _global("operator", "attrgetter", _text("x")),
    "numpy": _global("numpy.core.multiarray", "_reconstruct"),
    "runpy": _global("runpy", "run_path", _text(MARKER)),
    "persistent id": b"Psomething\n.",
    "extension": b"\x80\x02\x82\x01.",
    "metadata's module": b"\x80\x04\x8c\x24torch.distributed.checkpoint.metadata\x8c\x02os\x93.",
    "inside metadata": pickle.dumps(
        Metadata(state_dict_metadata={}, planner_data=Calls(os.system, f"touch {MARKER}"), storage_data={})
    ),
}


@pytest.fixture
def marker() -> Any:
    path = pathlib.Path(MARKER)
    path.unlink(missing_ok=True)
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused_and_not_run(name: str, marker: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "step-5"
    folder.mkdir()
    (folder / ".metadata").write_bytes(HOSTILE[name])
    with pytest.raises((UnsafeCheckpointError, CheckpointCorruptError), match=r"\.metadata"):
        metadata_pickle.parse(HOSTILE[name], "here")
    assert find_latest_valid(tmp_path) is None
    assert not Catalog(tmp_path).verify(5).ok
    with pytest.raises(CheckpointError):
        VolumeReader(folder).read_metadata()
    assert not marker.exists()


def test_most_of_the_corpus_is_called_unsafe_by_name() -> None:
    told = {}
    for name, content in HOSTILE.items():
        try:
            metadata_pickle.parse(content, "here")
        except UnsafeCheckpointError as error:
            told[name] = error.name
        except CheckpointCorruptError:
            continue
    assert len(told) >= len(HOSTILE) - 4
    assert told["eval"] == "builtins.eval"
    assert told["posix.system"] == "posix.system"


def test_reading_cannot_alter_classes_of_torch() -> None:
    poison = b"ctorch.distributed.checkpoint.metadata\nMetadata\n}(Vversion\nVpoisoned\nub."
    with pytest.raises(CheckpointCorruptError):
        metadata_pickle.parse(poison, "here")
    assert Metadata.version is None


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_hostile_object_in_a_stock_shard_is_not_run(tmp_path: pathlib.Path, marker: pathlib.Path) -> None:
    hostile = {"x": Calls(os.system, f"touch {MARKER}"), "w": torch.ones(3)}
    dcp.save(hostile, storage_writer=FileSystemWriter(tmp_path / "step-1"))
    live = {"x": 0, "w": torch.zeros(3)}
    with pytest.raises(BaseException) as caught:  # DCP's CheckpointException derives from BaseException
        dcp.load(live, storage_reader=VolumeReader(tmp_path / "step-1"))
    assert "UnsafeCheckpointError" in str(caught.value)
    assert not marker.exists()


def test_a_hostile_rank_file_is_refused_also_with_a_fitting_manifest(
    tmp_path: pathlib.Path, marker: pathlib.Path
) -> None:
    from sgpu.checkpoint import values

    content = io.BytesIO()
    torch.save(Calls(os.system, f"touch {MARKER}"), content)
    with pytest.raises(UnsafeCheckpointError, match="nothing of it was run"):
        values.from_bytes(content.getvalue(), "here", "rank-0.pt", "the state of rank 0")
    assert not marker.exists()


def test_state_that_could_not_be_loaded_safely_is_refused_when_saved(tmp_path: pathlib.Path) -> None:
    with (
        Checkpointer(CheckpointPolicy(str(tmp_path)), {"box": {"deep": [1, {"fn": len}]}}) as checkpointer,
        pytest.raises(CheckpointError, match=r"deep\.1\.fn holds a builtins\.builtin_function_or_method"),
    ):
        checkpointer.save(1)
    assert find_latest_valid(tmp_path) is None
