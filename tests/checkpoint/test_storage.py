"""Laws of a store, for each implementation; and what is refused early."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import uuid
from collections.abc import Iterator

import fsspec
import pytest

from sgpu.checkpoint.stores.opening import check_writable, open_store
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.checkpoint.stores.remote import FsspecStore
from sgpu.checkpoint.stores.store import CHUNK_BYTES, Store
from sgpu.contract.errors import CheckpointError
from sgpu.testing.stores import FaultyStore

# Azure's client library gives its own data to aiohttp in one piece.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body directly")


@pytest.fixture(params=["posix", "memory", "wrapped", "s3", "azure", "gcs"])
def store(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, s3_server: object, azure_server: object, gcs_server: object
) -> Store:
    if request.param == "memory":
        return open_store(f"memory://{uuid.uuid4()}/root")
    if request.param in ("s3", "azure", "gcs"):
        return open_store(request.getfixturevalue(request.param))
    inner = PosixStore(tmp_path / "root")
    return FaultyStore(inner) if request.param == "wrapped" else inner


def test_what_is_put_is_read(store: Store) -> None:
    content = bytes(range(256)) * (CHUNK_BYTES // 256) + b"tail"
    seen: list[int] = []
    parts = [memoryview(b"head"), memoryview(b""), memoryview(content)]
    assert store.put("a/b.bin", parts, lambda piece: seen.append(piece.nbytes)) == 4 + len(content)
    assert sum(seen) == 4 + len(content)
    assert store.size("a/b.bin") == 4 + len(content)
    assert store.read("a/b.bin", 4, 10) == content[:10]
    assert store.read("a/b.bin") == b"head" + content
    assert store.read("a/b.bin", 4 + len(content) - 4, 100) == b"tail"


def test_names_are_direct_children_only(store: Store) -> None:
    for path in ("x", "a/y", "a/b/z"):
        store.put(path, [memoryview(b"1")])
    assert store.names("") == ["a", "x"]
    assert store.names("a") == ["b", "y"]
    assert store.names("nothing") == []


def test_absent_files_and_folders(store: Store) -> None:
    assert store.size("no") is None
    store.put("a/y", [memoryview(b"1")])
    assert store.size("a") is None
    store.delete("no")
    store.delete_folder("no")
    with pytest.raises(FileNotFoundError):
        store.read("no")


def test_a_put_replaces_and_a_delete_removes(store: Store) -> None:
    store.put("f", [memoryview(b"old and longer")])
    store.put("f", [memoryview(b"new")])
    assert store.read("f") == b"new"
    store.delete("f")
    assert store.size("f") is None
    store.put("d/f", [memoryview(b"1")])
    store.delete_folder("d")
    assert store.names("d") == []


def test_a_put_that_fails_half_way_leaves_what_was_there(store: Store) -> None:
    def parts() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise OSError(28, "no space left on device")

    store.put("d/f", [memoryview(b"old")])
    with pytest.raises(OSError, match="no space"):
        store.put("d/f", parts())
    with pytest.raises(OSError, match="no space"):
        store.put("d/g", parts())
    assert store.read("d/f") == b"old"
    assert store.names("d") == ["f"]


def test_create_takes_a_name_once(store: Store) -> None:
    assert store.create("claim", b"1")
    assert not store.create("claim", b"2")
    assert store.read("claim") == b"1"


class _Flaky:
    """Stands before a file system; its first uploads fail."""

    def __init__(self, inner: fsspec.AbstractFileSystem, failures: int, error: OSError) -> None:
        self.inner, self.failures, self.error, self.calls = inner, failures, error, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def pipe_file(self, *arguments: object) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        self.inner.pipe_file(*arguments)


def _flaky_store(failures: int, error: OSError) -> tuple[FsspecStore, _Flaky, list[float]]:
    waits: list[float] = []
    store = FsspecStore(f"memory://{uuid.uuid4()}", sleep=waits.append)
    flaky = _Flaky(store._files, failures, error)
    store._files = flaky
    return store, flaky, waits


def test_uploads_are_retried_with_growing_waits() -> None:
    store, flaky, waits = _flaky_store(3, OSError("503 slow down"))
    store.put("f", [memoryview(b"content")])
    assert flaky.calls == 4
    assert store.read("f") == b"content"
    assert len(waits) == 3
    assert 0 < waits[0] < waits[2]


def test_uploads_that_cannot_succeed_are_not_retried() -> None:
    store, flaky, waits = _flaky_store(99, PermissionError("403"))
    with pytest.raises(PermissionError):
        store.put("f", [memoryview(b"content")])
    assert (flaky.calls, waits) == (1, [])


def test_an_unwritable_root_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*file/checkpoints"):
        check_writable(file / "checkpoints")
    check_writable(tmp_path / "fine")
    assert list((tmp_path / "fine").iterdir()) == []


def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(CheckpointError, match="nosuch"):
        check_writable("nosuch://bucket/x")


def test_what_the_launching_side_uses_loads_no_torch(tmp_path: pathlib.Path) -> None:
    script = (
        "import sys; from sgpu.checkpoint import check_writable, find_latest_valid, Catalog, CheckpointPolicy\n"
        "from sgpu.checkpoint.helper import __main__\nfrom sgpu.checkpoint.keeping import retention\n"
        f"check_writable({str(tmp_path)!r}); assert find_latest_valid({str(tmp_path)!r}) is None\n"
        "print([m for m in ('torch', 'numpy', 'mlflow', 'fsspec', 'IPython') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
