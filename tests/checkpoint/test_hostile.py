"""Whatever somebody puts into a checkpoint, and whoever reads it: nothing of it is run, and no memory is filled."""

from __future__ import annotations

import os
import pathlib
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from typer.testing import CliRunner

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, VolumeReader, find_latest_valid
from sgpu.checkpoint.format import checksum, metadata_pickle, values
from sgpu.checkpoint.format.manifest import FileEntry, Manifest
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.cli import app
from sgpu.contract.errors import CheckpointCorruptError, CheckpointError, UnsafeCheckpointError
from sgpu.testing import hostile
from sgpu.widgets.checkpoints.browser import CheckpointBrowser

MARKER = f"/tmp/sgpu-test-hostile-{os.getpid()}"
PICKLES = {**hostile.runs_code(MARKER), **hostile.fills_memory()}
ARCHIVES = hostile.archives(MARKER)
MOST_BYTES = 300 * 2**20
pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(autouse=True)
def nothing_is_run_and_little_memory_taken() -> Iterator[None]:
    marker = pathlib.Path(MARKER)
    marker.unlink(missing_ok=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert not marker.exists()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES
    version = getattr(Metadata, "version", None)  # torch 2.6 has none
    assert version is None or (isinstance(version, str) and version != "poisoned")


def test_every_pickle_is_refused_as_a_commit_record() -> None:
    refused = {}
    for name, content in PICKLES.items():
        with pytest.raises((UnsafeCheckpointError, CheckpointCorruptError), match=r"\.metadata") as caught:
            metadata_pickle.parse(content, "here")
        refused[name] = caught.value
    unsafe = {name for name in hostile.runs_code(MARKER) if isinstance(refused[name], UnsafeCheckpointError)}
    assert len(unsafe) > 30
    assert refused["eval"].facts["name"] == "builtins.eval"
    assert refused["posix.system"].facts["name"] == "posix.system"


@pytest.mark.parametrize("padding", [0, 300_000])
def test_long_records_are_looked_at_for_what_takes_memory(padding: int) -> None:
    padded = {name: b"\x80\x04" + b"N" * padding + content for name, content in hostile.fills_memory().items()}
    for name in ("memo index", "memo index as text", "text that is not there", "bytearray", "lists of lists as a path"):
        with pytest.raises((UnsafeCheckpointError, CheckpointCorruptError)):
            metadata_pickle.parse(padded[name], "here")


def test_every_archive_is_refused_as_an_object() -> None:
    for name, content in ARCHIVES.items():
        with pytest.raises((UnsafeCheckpointError, CheckpointCorruptError)) as caught:
            values.from_bytes(content, "here", "rank-0.pt", "the state of rank 0")
        assert "rank-0.pt" in str(caught.value), name


@dataclass(frozen=True, kw_only=True)
class Live:
    """Objects that a trainer would restore into."""

    box: dict[str, Any]

    def state_dict(self) -> Any:
        return {"n": 1}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("something hostile was loaded")


def _restore(root: pathlib.Path) -> Any:
    live = Live(box={"w": torch.zeros(3), "n": 0})
    policy, store = CheckpointPolicy(), PosixStore(root)
    with Checkpointer(policy, {"box": live.box}, per_rank={"own": live}, store=store) as checkpointer:
        restored = checkpointer.restore()
    assert not live.box["w"].any()
    return restored


def _load(root: pathlib.Path) -> None:
    live = {"w": torch.zeros(3), "n": 0}
    with pytest.raises(BaseException, match=r"\.metadata"):  # DCP's CheckpointException derives from BaseException
        dcp.load(live, storage_reader=VolumeReader(root / "step-00000005"))
    assert not live["w"].any()
    raise CheckpointError("as it should be")


def _command(*arguments: str) -> Callable[[pathlib.Path], None]:
    def do(root: pathlib.Path) -> None:
        told = CliRunner().invoke(app, ["checkpoints", arguments[0], str(root), *arguments[1:]])
        assert told.exception is None or isinstance(told.exception, (SystemExit, CheckpointError)), told.exception
        if told.exit_code:
            raise CheckpointError(told.output)

    return do


def _browse(root: pathlib.Path) -> None:
    browser = CheckpointBrowser(root)
    assert "damaged" in str(browser) or "unsafe" in str(browser) or [row.state for row in browser.rows] != ["whole"]
    raise CheckpointError("as it should be")


def _verify(root: pathlib.Path) -> None:
    assert not Catalog(root).verify(5, deep=True).ok
    raise CheckpointError("as it should be")


READERS: dict[str, Callable[[pathlib.Path], Any]] = {
    "verify": _verify,
    "inspect": lambda root: Catalog(root).inspect(5),
    "diff": lambda root: Catalog(root).diff(5, 5),
    "export": lambda root: Catalog(root).export(5, root / "out.pt", format="torch"),
    "reader": _load,
    "restore": _restore,
    "command verify": _command("verify", "--step", "5"),
    "command inspect": _command("inspect", "--step", "5"),
    "browser": _browse,
}


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "with a manifest that fits"])
def test_every_reader_refuses_every_commit_record(sealed: bool, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "step-00000005"
    folder.mkdir()
    for name, content in PICKLES.items():
        (folder / ".metadata").write_bytes(content)
        if sealed:
            entry = FileEntry(size_bytes=len(content), crc32c=checksum.of(content))
            manifest = Manifest(step=5, attempt=0, world_size=1, files={".metadata": entry}, created_unix_seconds=0.0)
            (folder / "manifest.json").write_bytes(manifest.to_bytes())
        assert find_latest_valid(tmp_path) is None, name
        assert Catalog(tmp_path).steps() == [], name
        for reader in READERS.values():
            with pytest.raises(CheckpointError):
                reader(tmp_path)


@pytest.mark.parametrize("target", ["box", "rank"])
def test_every_reader_refuses_what_lies_where_objects_do(
    target: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With checksums that fit, since whoever writes a checkpoint writes those too."""
    honest = values.to_bytes
    for number, (name, content) in enumerate(ARCHIVES.items()):
        root = tmp_path / str(number)

        def forged(value: Any, content: bytes = content) -> bytes:
            is_rank = isinstance(value, dict) and "rank" in value
            return content if is_rank == (target == "rank") else honest(value)

        with monkeypatch.context() as patch:
            patch.setattr(values, "to_bytes", forged)
            live = Live(box={"w": torch.zeros(3), "n": 0})
            with Checkpointer(
                CheckpointPolicy(), {"box": live.box}, per_rank={"own": live}, store=PosixStore(root)
            ) as checkpointer:
                checkpointer.save(5)
        assert Catalog(root).verify(5, deep=True).ok, name  # its bytes are those that were written
        with pytest.raises(CheckpointCorruptError, match=r"nothing of it was run|cannot be read"):
            _restore(root)
        shutil.rmtree(root)


def test_objects_in_stock_shards(tmp_path: pathlib.Path) -> None:
    for number, content in enumerate(ARCHIVES.values()):
        folder = tmp_path / f"step-{number}"
        folder.mkdir()
        (folder / "__0_0.distcp").write_bytes(content)
        record = Metadata(
            state_dict_metadata={"x": BytesStorageMetadata()},
            storage_data={MetadataIndex("x"): _StorageInfo("__0_0.distcp", 0, len(content))},
        )
        (folder / ".metadata").write_bytes(pickle.dumps(record))
        live = {"x": 0}
        with pytest.raises(BaseException, match=r"nothing of it was run|cannot be read"):
            dcp.load(live, storage_reader=VolumeReader(folder))
        assert live == {"x": 0}


def test_code_in_the_planner_s_data_is_refused(tmp_path: pathlib.Path) -> None:
    for value in (hostile.Calls(os.system, f"touch {MARKER}"), {"x": hostile.Calls(eval, "1")}):
        record = pickle.dumps(Metadata(state_dict_metadata={}, planner_data=value, storage_data={}))
        with pytest.raises(UnsafeCheckpointError, match=r"system|eval"):
            metadata_pickle.parse(record, "here")


def test_a_manifest_that_is_deep_or_of_other_types_is_damaged(tmp_path: pathlib.Path) -> None:
    good = Manifest(step=5, attempt=0, world_size=1, files={}, created_unix_seconds=0.0).to_bytes()
    rest = good[good.index(b",") + 1 :]
    for other in (
        rest.replace(b'"metadata":{}', b'"metadata":' + b"[" * 100_000 + b"]" * 100_000),
        rest.replace(b'"files":{}', b'"files":[]'),
        rest.replace(b'"files":{}', b'"files":{"f":{"bytes":"many","crc32c":"00000000"}}'),
        rest.replace(b'"files":{}', b'"files":{"f":{"bytes":-1,"crc32c":"00000000"}}'),
        rest.replace(b'"files":{}', b'"files":{"f":{"bytes":1,"crc32c":"00000000","items":[["x",0,-1,"0",0,0]]}}'),
        rest.replace(b'"step":5', b'"stop":5'),
    ):
        assert other != rest
        sealed = b'{"crc32c":"' + checksum.text(checksum.of(other)).encode() + b'",' + other
        with pytest.raises(CheckpointCorruptError, match=r"manifest\.json"):
            Manifest.from_bytes(sealed, "here")
