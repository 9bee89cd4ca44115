"""A real S3 server: saves, restores, races, and the faults that networks and servers have."""

from __future__ import annotations

import pathlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
import s3fs
import torch

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, VolumeReader, VolumeWriter, find_latest_valid
from sgpu.checkpoint.stores.opening import open_store
from sgpu.checkpoint.stores.remote import IN_MEMORY_BYTES, FsspecStore
from sgpu.checkpoint.stores.store import Store
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


class Provider:
    """Keeps credentials in a file, where clients look them up."""

    def __init__(self, file: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = file
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))

    def give(self, key: str, secret: str) -> None:
        self._file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")


@pytest.fixture
def provider(proxy: FaultyProxy, s3_server: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Provider:
    """Has given the first credentials."""
    found = Provider(tmp_path / "credentials", monkeypatch)
    found.give(s3_server.key, s3_server.secret)
    return found


def test_a_token_that_expires_is_replaced_by_the_provider_s_next(
    s3: str, s3_server: Any, proxy: FaultyProxy, provider: Provider
) -> None:
    box = {"w": torch.ones(1000)}
    with Checkpointer(CheckpointPolicy(s3), {"box": box}) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        proxy.expire(s3_server.key)
        provider.give("second", "second")
        box["w"].fill_(2)
        checkpointer.save(2)
    assert proxy.fired
    assert Catalog(s3).verify(2, deep=True).ok


def test_without_new_credentials_the_save_says_so_and_the_copy_in_memory_is_resumed_from(
    s3: str, s3_server: Any, proxy: FaultyProxy, provider: Provider, helper: Any
) -> None:
    box = {"w": torch.ones(1000)}
    policy = CheckpointPolicy(s3, on_error="warn")
    checkpointer = Checkpointer(policy, {"box": box})
    checkpointer.save(1)
    checkpointer.wait()
    proxy.expire(s3_server.key)
    box["w"].fill_(2)
    checkpointer.save(2)
    checkpointer.close()
    error = checkpointer.poll()[-1].error or ""
    assert "step 2 was not saved" in error
    assert "token has expired" in error
    assert "The credentials for s3://bucket/" in error
    assert proxy.fired
    provider.give("second", "second")
    assert Catalog(s3).steps() == [1]
    live = {"w": torch.zeros(1000)}
    with Checkpointer(policy, {"box": live}, generation=1) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert (restored.step, restored.source, set(live["w"].tolist())) == (2, "memory", {2.0})
        checkpointer.save(3)
    assert Catalog(s3).latest() == 3


def test_slow_storage_holds_up_the_next_save_and_not_the_training(s3: str, proxy: FaultyProxy) -> None:
    box = {"w": torch.ones(40_000)}
    with Checkpointer(CheckpointPolicy(s3), {"box": box}) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        proxy.bytes_per_second = 100_000
        checkpointer.save(2)
        box["w"].fill_(3)  # the training goes on
        checkpointer.save(3)
        proxy.bytes_per_second = None
    _, slow, next_one = checkpointer.poll()
    assert slow.save_seconds > 1.5  # 160 kB
    assert slow.blocked_seconds < slow.save_seconds / 4
    assert next_one.blocked_seconds > slow.save_seconds / 2  # back-pressure, counted where it was felt
    assert Catalog(s3).verify(2, deep=True).ok
    assert Catalog(s3).verify(3, deep=True).ok


def test_what_stalls_is_given_up_and_tried_again(s3: str, proxy: FaultyProxy) -> None:
    store = FsspecStore(s3, stall_seconds=1.0)
    store.put("f", [memoryview(b"old")])
    proxy.fail("hold", connections=1)
    assert store.put("f", [memoryview(b"new")]) == 3
    assert proxy.fired == 1
    assert store.read("f") == b"new"
    proxy.fail("hold", connections=1000)
    with pytest.raises(TimeoutError, match="no answer to cat_file within"):
        store.read("f", 0, 1)
    proxy.release()


def test_an_upload_in_parts_that_is_cut_is_done_again(s3: str, proxy: FaultyProxy) -> None:
    store = open_store(s3)
    size = IN_MEMORY_BYTES + 5 * 2**20
    content = bytes(size - 3) + b"end"
    store.put("other", [memoryview(b"1")])
    proxy.fail("cut", connections=1, after_bytes=10 * 2**20)
    assert store.put("f", [memoryview(content)]) == size
    assert proxy.fired == 1
    assert store.read("f", size - 5) == b"\0\0end"
    assert store.names("") == ["f", "other"]


def test_a_place_that_may_only_be_read_is_refused_by_name(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "reader")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be written to s3://bucket/.*Access Denied"):
        Checkpointer(CheckpointPolicy(s3), {"box": {}})
