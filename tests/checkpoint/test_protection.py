"""What is never pruned, what is told as damaged, and what dead saves left."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.contract.errors import CheckpointNotFoundError
from sgpu.testing.stores import GateStore


def save(root: pathlib.Path, *steps: int, keep: int = 99, **policy: Any) -> None:
    box = {"w": torch.zeros(64)}
    with Checkpointer(CheckpointPolicy(keep_last=keep, **policy), {"box": box}, store=PosixStore(root)) as checkpointer:
        for step in steps:
            checkpointer.save(step)


def test_a_protected_step_outlives_every_rule_of_every_run(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 1, 2, 3)
    catalog = Catalog(tmp_path)
    assert catalog.protect(1, "published") == str(tmp_path / "step-00000001")
    assert catalog.protected() == {1: "published"}
    save(tmp_path, 4, keep=1)  # another run's rule
    assert catalog.steps() == [1, 4]
    assert catalog.prune(keep_last=1) == []
    (entry,) = [entry for entry in catalog.entries() if entry.protected]
    assert (entry.step, entry.reason, entry.state) == (1, "published", "valid")
    catalog.unprotect(1)
    assert catalog.protected() == {}
    assert catalog.prune(keep_last=1) == ["step-00000001"]
    with pytest.raises(CheckpointNotFoundError, match=r"step 1 is not protected .* protected: \[\]"):
        catalog.unprotect(1)
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 1"):
        catalog.protect(1)


def test_what_is_protected_between_deciding_and_removing_stays(tmp_path: pathlib.Path) -> None:
    from sgpu.checkpoint.keeping import prune

    save(tmp_path, 1, 2)
    Catalog(tmp_path).protect(1)
    prune.remove(PosixStore(tmp_path), "step-00000001")
    assert Catalog(tmp_path).steps() == [1, 2]


def test_a_marker_that_cannot_be_read_protects_all_the_same(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / ".protected-step-00000001").write_bytes(b"\xff{")
    (tmp_path / ".protected-mine").write_bytes(b"")
    assert Catalog(tmp_path).protected() == {1: ""}
    assert Catalog(tmp_path).prune(keep_last=1) == []


def test_every_missing_and_damaged_file_is_told_and_nothing_is_deleted(tmp_path: pathlib.Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-00000001" / "__0_0.distcp").write_bytes(b"cut")
    (tmp_path / "step-00000002" / "__0_0.distcp").unlink()
    (tmp_path / "step-00000002" / "manifest.json").write_bytes(b"{}")
    shard = tmp_path / "step-00000003" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    catalog = Catalog(tmp_path)
    broken = {entry.step: entry.problems for entry in catalog.quarantine()}
    assert broken[1][0].startswith("__0_0.distcp: it has 3 bytes and should have ")
    assert "checksum does not fit" in broken[2][0]
    assert broken.keys() == {1, 2}
    deep = {entry.step: entry.problems for entry in catalog.quarantine(deep=True)}
    assert deep.keys() == {1, 2, 3}
    assert "box.__values__ in __0_0.distcp" in deep[3][0]
    assert [(entry.step, entry.state) for entry in catalog.entries()] == [
        (4, "valid"), (3, "valid"), (2, "damaged"), (1, "damaged")]  # fmt: skip
    save(tmp_path, 5, 6, keep=1)
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-00000001", "step-00000002", "step-00000006.a1"}


def test_all_missing_files_of_one_are_named(tmp_path: pathlib.Path) -> None:
    class Own:
        def state_dict(self) -> Any:
            return {"n": 1}

        def load_state_dict(self, state: Any) -> None: ...

    with Checkpointer(
        CheckpointPolicy(), {"box": {"w": torch.zeros(9)}}, per_rank={"own": Own()}, store=PosixStore(tmp_path)
    ) as checkpointer:
        checkpointer.save(1)
    for file in ("__0_0.distcp", "rank-0.pt"):
        (tmp_path / "step-00000001" / file).unlink()
    (entry,) = Catalog(tmp_path).quarantine()
    assert entry.problems == ("__0_0.distcp: it is missing", "rank-0.pt: it is missing")


def test_saves_that_a_dead_run_has_begun_are_told_and_cleared_and_those_of_a_live_one_are_not(
    tmp_path: pathlib.Path,
) -> None:
    save(tmp_path, 1)
    left = tmp_path / "step-00000002"
    left.mkdir()
    (left / ".done-0.json").write_text("{}")
    mine = tmp_path / "step-00000003"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    gate = GateStore(PosixStore(tmp_path), holds=lambda path: path.endswith("manifest.json"))
    live = Checkpointer(CheckpointPolicy(), {"box": {"w": torch.zeros(9)}}, store=gate)
    live.save(4)
    assert gate.reached.wait(30)
    states = {entry.folder: entry.state for entry in Catalog(tmp_path).entries()}
    assert states == {
        "step-00000001": "valid", "step-00000002": "abandoned", "step-00000003": "abandoned",
        "step-00000004.a1": "being written",
    }  # fmt: skip
    assert Catalog(tmp_path).prune() == ["step-00000002"]  # what holds nothing of ours is not ours
    assert (mine / "notes.txt").exists()
    gate.open_gate()
    live.close()
    assert Catalog(tmp_path).steps() == [1, 4]
