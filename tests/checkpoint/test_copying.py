"""A step in a second root: linked on one disk, copied elsewhere, whole or not at all."""

from __future__ import annotations

import errno
import os
import pathlib
import shutil
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy
from sgpu.contract.errors import CheckpointCorruptError, CheckpointNotFoundError, InputError


@pytest.fixture
def first(tmp_path: pathlib.Path) -> pathlib.Path:
    """Steps 1 and 2 of a tensor that is full of its step."""
    root = tmp_path / "first"
    state: dict[str, Any] = {"weight": torch.zeros(1000)}
    with Checkpointer(CheckpointPolicy(root=str(root)), state) as checkpointer:
        for step in (1, 2):
            state["weight"].fill_(step)
            checkpointer.save(step, metadata={"epoch": step})
    return root


def restored(root: pathlib.Path) -> float:
    state = {"weight": torch.zeros(1000)}
    with Checkpointer(CheckpointPolicy(root=str(root)), state) as checkpointer:
        checkpointer.restore()
    return float(state["weight"].mean())


def test_a_linked_step_takes_no_room_and_outlives_the_first_root(first: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = pathlib.Path(Catalog(first).copy(1, tmp_path / "second"))
    assert Catalog(tmp_path / "second").verify(1, deep=True).ok
    shard = next(path.glob("*.distcp"))
    assert shard.stat().st_nlink == 2
    shutil.rmtree(first)
    assert restored(tmp_path / "second") == 1.0


def test_where_nothing_can_be_linked_bytes_are_copied(
    first: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(before: Any, after: Any) -> None:
        tried.append(after)
        raise OSError(errno.EXDEV, "another disk")

    monkeypatch.setattr(os, "link", refuse)
    path = pathlib.Path(Catalog(first).copy(2, tmp_path / "second"))
    assert tried
    assert next(path.glob("*.distcp")).stat().st_nlink == 1
    assert restored(tmp_path / "second") == 2.0


def test_a_step_that_is_damaged_missing_or_there_already_is_refused(
    first: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    catalog = Catalog(first)
    with pytest.raises(CheckpointNotFoundError, match="step 7"):
        catalog.copy(7, tmp_path / "second")
    catalog.copy(1, tmp_path / "second")
    with pytest.raises(InputError, match="has step 1 already"):
        catalog.copy(1, tmp_path / "second")
    shard = next((first / "step-00000002").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointCorruptError):
        catalog.copy(2, tmp_path / "second")
    assert Catalog(tmp_path / "second").steps() == [1]


def test_a_copy_that_breaks_off_is_no_checkpoint(
    first: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, linked = os.link, []

    def link(before: Any, after: Any) -> None:
        if len(linked) == 1:
            raise FileNotFoundError(errno.ENOENT, "pruned meanwhile", str(before))
        linked.append(after)
        real(before, after)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(FileNotFoundError):
        Catalog(first).copy(1, tmp_path / "second")
    assert linked
    assert Catalog(tmp_path / "second").steps() == []


def test_to_an_object_store_and_of_a_plain_dcp_folder(tmp_path: pathlib.Path) -> None:
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"weight": torch.full((10,), 3.0)}, checkpoint_id=tmp_path / "plain" / "step-5", no_dist=True)
    root = "memory://copied"
    Catalog(tmp_path / "plain").copy(5, root)
    assert Catalog(root).steps() == [5]
    assert Catalog(root).inspect(5).tensors
