"""A real S3 server: saves, restores, races, and the faults that networks and servers have."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
import s3fs
import torch

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, VolumeReader, VolumeWriter, find_latest_valid
from sgpu.checkpoint.storage import Store, open_store
from sgpu.contract.errors import CheckpointError
from sgpu.testing.proxy import Fault, FaultyProxy

Through = Callable[[], FaultyProxy]


@pytest.fixture
def proxy(s3: str, s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """What this test says to S3 goes through it."""
    with FaultyProxy("127.0.0.1", s3_server.port) as between:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{between.port}")
        s3fs.S3FileSystem.clear_instance_cache()
        yield between


def test_saves_are_restored_pruned_and_verified(s3: str) -> None:
    box = {"w": torch.zeros(200_000), "n": 0}
    with Checkpointer(CheckpointPolicy(s3, keep_last=2), {"box": box}) as checkpointer:
        assert checkpointer.restore() is None
        for step in (1, 2, 3):
            box["w"].fill_(step)
            box["n"] = step
            checkpointer.save(step)
    catalog = Catalog(s3)
    assert catalog.steps() == [2, 3]
    assert catalog.verify(3, deep=True).ok
    assert find_latest_valid(s3) == f"{s3}/step-00000003"
    live = {"w": torch.zeros(200_000), "n": 0}
    with Checkpointer(CheckpointPolicy(s3), {"box": live}) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert (restored.step, live["n"], set(live["w"].tolist())) == (3, 3, {3.0})


def test_a_damaged_object_is_passed_over(s3: str) -> None:
    with Checkpointer(CheckpointPolicy(s3), {"box": {"w": torch.ones(1000)}}) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    files, path = fsspec.core.url_to_fs(f"{s3}/step-00000002/__0_0.distcp")
    content = bytearray(files.cat_file(path))
    content[1500] ^= 1
    files.pipe_file(path, bytes(content))
    live = {"w": torch.zeros(1000)}
    with Checkpointer(CheckpointPolicy(s3), {"box": live}) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.step == 1
    assert "box.w" in restored.skipped[0].reason


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp(s3: str) -> None:
    import torch.distributed.checkpoint as dcp

    state = {"w": torch.randn(300), "n": 5}
    dcp.save(state, storage_writer=VolumeWriter(f"{s3}/step_7"), no_dist=True)
    loaded = {"w": torch.zeros(300), "n": 0}
    dcp.load(loaded, storage_reader=VolumeReader(f"{s3}/step_7"), no_dist=True)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["n"] == 5


def test_one_winner_of_a_race_to_create(s3: str) -> None:
    start = threading.Barrier(8)
    won: list[bool] = []

    def race(store: Store) -> None:
        start.wait()
        won.append(store.create("claim", uuid.uuid4().bytes))

    threads = [threading.Thread(target=race, args=(open_store(s3),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]


@pytest.mark.parametrize("size", [0, 1, 5 * 2**20, 64 * 2**20, 64 * 2**20 + 1])
def test_sizes_around_those_of_parts(size: int, s3: str) -> None:
    store = open_store(s3)
    content = bytes(size - 3) + b"end" if size > 3 else b"x" * size
    assert store.put("f", [memoryview(content)]) == size
    assert store.size("f") == size
    assert store.read("f", max(0, size - 3)) == content[-3:]


@pytest.mark.parametrize(("fault", "connections"), [("reset", 3), ("unavailable", 3), ("cut", 2)])
def test_faults_that_pass_are_retried(fault: Fault, connections: int, s3: str, proxy: FaultyProxy) -> None:
    box = {"w": torch.ones(100_000)}
    with Checkpointer(CheckpointPolicy(s3), {"box": box}) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        proxy.fail(fault, connections=connections, after_bytes=65536)
        box["w"].fill_(2)
        checkpointer.save(2)
    assert proxy.fired == connections
    assert checkpointer.poll()[-1].error is None
    assert Catalog(s3).verify(2, deep=True).ok


def test_a_store_that_stays_away_fails_the_save_and_keeps_the_one_before(s3: str, proxy: FaultyProxy) -> None:
    box = {"w": torch.ones(1000)}
    checkpointer = Checkpointer(CheckpointPolicy(s3, on_error="warn"), {"box": box})
    checkpointer.save(1)
    checkpointer.wait()
    proxy.fail("reset", connections=10_000)
    checkpointer.save(2)
    checkpointer.wait()
    assert "step 2 was not saved" in (checkpointer.poll()[-1].error or "")
    assert proxy.fired > 3
    proxy.fail("reset", connections=0)
    checkpointer.save(2)
    checkpointer.close()
    assert Catalog(s3).steps() == [1, 2]


def test_credentials_that_expired_are_looked_up_anew(
    s3: str, s3_server: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "credentials"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def write(secret: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {s3_server.key}\naws_secret_access_key = {secret}\n")

    write("of yesterday")
    store = open_store(s3)
    with pytest.raises(PermissionError):
        store.put("f", [memoryview(b"1")])
    write(s3_server.secret)
    assert store.put("f", [memoryview(b"1")]) == 1


def test_a_place_that_may_only_be_read_is_refused_by_name(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "reader")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to s3://bucket/.*Access Denied"):
        Checkpointer(CheckpointPolicy(s3), {"box": {}})
