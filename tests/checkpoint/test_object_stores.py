"""Azure and GCS, by their emulators: the same as on a folder, and one winner of a race."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, VolumeReader, VolumeWriter, find_latest_valid
from sgpu.checkpoint.stores.opening import open_store
from sgpu.checkpoint.stores.remote import IN_MEMORY_BYTES
from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sending a large body directly"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


@pytest.fixture(params=["azure", "gcs"])
def url(request: pytest.FixtureRequest, azure_server: Any, gcs_server: Any) -> str:
    found: str = request.getfixturevalue(request.param)
    return found


def test_saves_are_restored_pruned_and_verified(url: str) -> None:
    box = {"w": torch.zeros(100_000), "n": 0}
    with Checkpointer(CheckpointPolicy(url, keep_last=2), {"box": box}) as checkpointer:
        assert checkpointer.restore() is None
        for step in (1, 2, 3):
            box["w"].fill_(step)
            box["n"] = step
            checkpointer.save(step)
    assert [report.error for report in checkpointer.poll()] == [None] * 3
    catalog = Catalog(url)
    assert catalog.steps() == [2, 3]
    assert catalog.verify(3, deep=True).ok
    assert find_latest_valid(url) == f"{url}/step-00000003"
    live = {"w": torch.zeros(100_000), "n": 0}
    with Checkpointer(CheckpointPolicy(url), {"box": live}) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert (restored.step, live["n"], set(live["w"].tolist())) == (3, 3, {3.0})


def test_plain_dcp(url: str) -> None:
    state = {"w": torch.randn(300), "n": 5}
    dcp.save(state, storage_writer=VolumeWriter(f"{url}/step_7"), no_dist=True)
    loaded = {"w": torch.zeros(300), "n": 0}
    dcp.load(loaded, storage_reader=VolumeReader(f"{url}/step_7"), no_dist=True)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["n"] == 5


def test_one_winner_of_a_race_to_create(url: str) -> None:
    start = threading.Barrier(6)
    won: list[bool] = []

    def race(store: Store) -> None:
        start.wait()
        won.append(store.create("claim", uuid.uuid4().bytes))

    threads = [threading.Thread(target=race, args=(open_store(url),)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 5 + [True]


def test_what_does_not_fit_into_one_part(url: str) -> None:
    store = open_store(url)
    size = IN_MEMORY_BYTES + 1
    assert store.put("f", [memoryview(bytes(size - 3) + b"end")]) == size
    assert store.read("f", size - 5) == b"\0\0end"
    assert store.read("f", size, 5) == b""


def test_a_bucket_that_is_not_there_is_refused_and_not_made(url: str) -> None:
    elsewhere = url.replace("://bucket/", "://no-such-bucket/")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        Checkpointer(CheckpointPolicy(elsewhere), {"box": {}})
    assert open_store(elsewhere).names("") == []
