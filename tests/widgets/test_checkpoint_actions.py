"""What is done to checkpoints, and what is refused."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sgpu import resuming
from sgpu.checkpoint import Catalog
from sgpu.contract.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, InputError
from sgpu.widgets.checkpoints import actions, detail
from sgpu.widgets.checkpoints.place import find_place
from sgpu.widgets.checkpoints.rows import Shelf

OpenedShelf = Callable[[Any], Shelf]


def test_the_last_valid_one_is_not_deleted(root: pathlib.Path, opened_shelf: OpenedShelf) -> None:
    shelf = opened_shelf(root)
    for step in (50, 40, 30, 20):
        assert actions.delete(shelf, step) == f"step {step} is deleted (1 folder)"
    with pytest.raises(InputError, match="step 10 is the last valid checkpoint; it is not deleted"):
        actions.delete(shelf, 10)
    with pytest.raises(CheckpointNotFoundError):
        actions.delete(shelf, 20)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000010"]


def test_what_a_running_run_was_restored_from_is_not_deleted(run: Any, shelves: Any) -> None:
    shelves.many(run.dir.checkpoints, 3)
    run.event("restored", step=20)
    run.status("RUNNING")
    shelf = Shelf(find_place(run.dir))
    with pytest.raises(InputError, match="resumed from step 20"):
        actions.delete(shelf, 20)
    run.status("FAILED", ended=run.created + 9)
    assert "deleted" in actions.delete(shelf, 20)


def test_verifying_reads_every_byte(root: pathlib.Path, shelves: Any, opened_shelf: OpenedShelf) -> None:
    shelf = opened_shelf(root)
    assert actions.verify(shelf, 50) == "step 50: every byte is as it was written"
    shard = root / "step-00000050" / shelves.SHARD
    content = bytearray(shard.read_bytes())
    content[70] ^= 4
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step 50 is damaged: model\.embed\.weight in __0_0\.distcp"):
        actions.verify(shelf, 50)
    assert shelf.rows[0].state == "damaged"


def test_how_to_go_on_from_each_step(
    run: Any, shelves: Any, monkeypatch: pytest.MonkeyPatch, opened_shelf: OpenedShelf
) -> None:
    shelves.many(run.dir.checkpoints, 3)
    run.status("FAILED", ended=run.created + 9)
    shelf = opened_shelf(run.dir)
    newest = actions.newest_whole(shelf)
    told = {row.step: detail.resumption(shelf.place, row, newest) for row in shelf.rows}
    assert told[30].button == "Resume the run from here"
    assert told[30].code.endswith(f'("{run.dir.id}").resume()')
    assert told[20].button == "Begin a new run from here"
    assert told[20].code.endswith(f'("{run.dir.id}").resume(step=20)')
    run.status("RUNNING")
    assert detail.resumption(shelf.place, shelf.rows[0], newest).button == "Begin a new run from here"
    asked = []
    monkeypatch.setattr(resuming, "resume", lambda former, status, step: asked.append(step) or former)
    assert "goes on from step 20" in actions.resume(shelf, 20)
    assert asked == [20]


def test_protection_comes_and_goes_and_says_why(root: pathlib.Path, opened_shelf: OpenedShelf) -> None:
    shelf = opened_shelf(root)
    assert "step 20 is protected" in actions.protect(shelf, 20, "published")
    assert next(row.kept for row in shelf.rows if row.step == 20) == ("protected (published)",)
    assert Catalog(root).protected() == {20: "published"}
    with pytest.raises(InputError, match="end the protection first"):
        actions.delete(shelf, 20)
    with pytest.raises(CheckpointCorruptError, match="step-00000030"):
        actions.protect(shelf, 30, "")
    assert "no longer" in actions.unprotect(shelf, 20)
    assert next(row.kept for row in shelf.rows if row.step == 20) == ()
    with pytest.raises(CheckpointNotFoundError, match="step 20 is not protected"):
        actions.unprotect(shelf, 20)


def test_verifying_all_finds_every_damaged_one_and_deletes_none(
    root: pathlib.Path, shelves: Any, opened_shelf: OpenedShelf
) -> None:
    shard = root / "step-00000010" / shelves.SHARD
    content = bytearray(shard.read_bytes())
    content[70] ^= 4
    shard.write_bytes(content)
    shelf, said = opened_shelf(root), list[str]()
    assert actions.verify_all(shelf, said.append) == ("2 of 5 checkpoints damaged (step 30, 10); left for a look")
    assert said[-1] == "reading every byte: 4 of 5 checkpoints …"
    assert {row.step for row in shelf.rows if row.state == "damaged"} == {10, 30}
    assert len(list(root.glob("step-*"))) == 5
