"""A store whose listings are late, as some object stores' are: the newest checkpoint is found all the same."""

from __future__ import annotations

import pathlib

import torch

from sgpu.checkpoint import Checkpointer, CheckpointPolicy
from sgpu.checkpoint.keeping import choose
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.testing.stores import LateListingStore


def save(store: LateListingStore, *steps: int, keep_last: int = 3) -> None:
    box = {"w": torch.zeros(100)}
    with Checkpointer(CheckpointPolicy(keep_last=keep_last), {"box": box}, store=store) as checkpointer:
        for step in steps:
            box["w"].fill_(step)
            checkpointer.save(step)


def restored(store: LateListingStore) -> int:
    live = {"w": torch.zeros(100)}
    with Checkpointer(CheckpointPolicy(), {"box": live}, store=store) as checkpointer:
        found = checkpointer.restore()
    assert found is not None
    assert found.skipped == ()
    assert set(live["w"].tolist()) == {float(found.step)}
    return found.step


def late(root: pathlib.Path) -> LateListingStore:
    store = LateListingStore(PosixStore(root))
    store.catch_up()
    return store


def test_the_newest_is_found_though_no_list_has_it(tmp_path: pathlib.Path) -> None:
    save(late(tmp_path), 1)
    store = late(tmp_path)
    save(store, 2)
    assert not any(name.startswith("step-00000002") for name in store.names(""))
    assert restored(store) == 2
    opened = choose.newest_valid(store)
    assert opened is not None
    assert opened.folder.startswith("step-00000002")
    assert store.late > 3


def test_a_list_that_still_has_what_was_removed_leads_to_nothing_wrong(tmp_path: pathlib.Path) -> None:
    save(late(tmp_path), 1, 2)
    store = late(tmp_path)
    save(store, 3, keep_last=1)
    assert not (tmp_path / "step-00000001").exists()
    assert "step-00000001" in store.names("")
    assert restored(store) == 3


def test_an_attempt_s_number_is_not_used_again(tmp_path: pathlib.Path) -> None:
    """Its folders may hold committed checkpoints that no list has."""
    empty = LateListingStore(PosixStore(tmp_path))
    save(empty, 5)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-00000005").iterdir()}
    another = LateListingStore(PosixStore(tmp_path))
    save(another, 5)
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-00000005").iterdir()} == before
    assert (tmp_path / "step-00000005.a1" / ".metadata").exists()


def test_the_hint_alone_makes_no_checkpoint(tmp_path: pathlib.Path) -> None:
    save(late(tmp_path), 1)
    for noted in (b"step-00000009", b"../elsewhere", b"\xff\xfe", b""):
        (tmp_path / ".newest").write_bytes(noted)
        assert restored(late(tmp_path)) == 1
