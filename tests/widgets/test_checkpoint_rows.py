"""Checkpoints as rows, as text and as a page: what is there, and why."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sgpu.checkpoint import Catalog
from sgpu.checkpoint.keeping.choose import open_checkpoint
from sgpu.contract.errors import CheckpointNotFoundError, InputError
from sgpu.contract.policies import CheckpointPolicy
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import read_spec
from sgpu.widgets import CheckpointBrowser
from sgpu.widgets.checkpoints import actions
from sgpu.widgets.checkpoints.place import find_place
from sgpu.widgets.checkpoints.rows import CheckpointRow, Shelf, curves_of, reasons
from sgpu.widgets.checkpoints.values import look_at

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OpenedShelf = Callable[[Any], Shelf]


def test_rows_tell_what_is_there_and_what_is_wrong(root: pathlib.Path) -> None:
    rows = CheckpointBrowser(root).rows
    assert [(row.step, row.state) for row in rows] == [
        (50, "valid"), (40, "valid"), (30, "damaged"), (20, "valid"), (10, "valid")
    ]  # fmt: skip
    assert "has" in rows[2].why
    assert "__0_0.distcp" in rows[2].why
    assert rows[0].metrics == {"loss": 0.2}
    assert (rows[0].world_size, rows[0].kept) == (2, ("the newest",))
    assert rows[2].kept == ("damaged: left for a look",)


def test_a_run_adds_times_and_metrics_and_reasons(run: Any, shelves: Any) -> None:
    shelves.many(run.dir.checkpoints, 6, run_id=run.dir.id)
    spec = replace(
        read_spec(run.dir),
        checkpoints=CheckpointPolicy(keep_last=2, keep_every=20, keep_best={"metric": "loss", "count": 2}),
    )
    spec.write(run.dir)
    run.event("checkpoint_committed", step=60, blocked_seconds=0.02, save_seconds=1.1, after_seconds=9)
    run.event("restored", step=30)
    run.metrics(60, accuracy=0.9, loss=4.0, fetch_seconds=0.1)
    shelf = Shelf(find_place(run.dir))
    shelf.refresh()
    assert shelf.rows[0].save_seconds == 1.1
    assert shelf.rows[0].state == "unchecked"
    browser = CheckpointBrowser(str(run.dir.root))
    browser.shelf.take_curves(curves_of(browser.shelf.place))
    kept = {row.step: row.kept for row in browser.rows}
    assert kept == {
        60: ("the newest", "every 20 steps", "best by loss"), 50: ("one of the last 2", "best by loss"),
        40: ("every 20 steps",), 30: ("resumed from",), 20: ("every 20 steps",), 10: (),
    }  # fmt: skip
    newest = browser.rows[0]
    assert (newest.blocked_seconds, newest.save_seconds) == (0.02, 1.1)
    assert newest.metrics["accuracy"] == 0.9
    assert newest.metrics["loss"] == pytest.approx(1 / 6)  # what was saved with it beats what was logged
    assert "fetch_seconds" not in newest.metrics


def test_the_older_attempt_is_shown_where_the_newer_is_damaged(
    root: pathlib.Path, shelves: Any, opened_shelf: OpenedShelf
) -> None:
    newer = root / "step-00000050.a1"
    shelves.write(newer, {"w": (2,)}, step=50)
    assert opened_shelf(root).rows[0].folder == "step-00000050.a1"
    (newer / shelves.SHARD).write_bytes(b"")
    shelf = opened_shelf(root)
    assert shelf.check(50) is not None
    assert shelf.rows[0].folder == "step-00000050"
    assert shelf.rows[0].state == "valid"


def test_foreign_and_unfinished_folders_are_no_checkpoints(root: pathlib.Path) -> None:
    for name in ("step-00000060", "step-100.backup", "foo-step-200"):
        (root / name).mkdir()
    text = str(CheckpointBrowser(root))
    assert "60" not in [row.step for row in CheckpointBrowser(root).rows]
    assert "1 folder of saves that were never completed" in text


def test_plain_dcp_folders_are_shown_as_without_checksums(tmp_path: pathlib.Path, opened_shelf: OpenedShelf) -> None:
    state = {"w": torch.arange(6, dtype=torch.bfloat16), "empty": torch.zeros(0), "note": "x"}
    dcp.save(state, checkpoint_id=tmp_path / "plain" / "step_7", no_dist=True)
    shelf = opened_shelf(tmp_path / "plain")
    opened = shelf.check(7)
    assert opened is not None
    assert shelf.rows[0].state == "unverified"
    values = look_at(shelf.store, opened, "w")
    assert (values.count, values.low, values.high, values.checked) == (6, 0.0, 5.0, False)
    assert look_at(shelf.store, opened, "empty").bins == ()


def test_places_are_found_by_what_people_have(run: Any, root: pathlib.Path, home: pathlib.Path) -> None:
    run.dir.checkpoints.mkdir()
    (home / "runs").mkdir(parents=True)
    run.dir.root.rename(home / "runs" / run.dir.id)
    moved = RunDir(home / "runs" / run.dir.id)
    for given_place in (moved, run.dir.id, str(moved.root), moved.root, moved.checkpoints):
        place = find_place(given_place)
        assert place.root == str(moved.checkpoints)
        assert place.run == moved
    assert find_place(root).run is None
    for wrong in ("/no/such/folder", "no-such-run", 7, None):
        with pytest.raises(InputError):
            find_place(wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint of step 7 .* there are \[50, 40"):
        CheckpointBrowser(root, step=7)


def test_without_a_rule_only_the_newest_whole_one_is_sure_to_stay() -> None:
    rows = [CheckpointRow(step=step, folder="x", state="damaged" if step == 9 else "valid") for step in (9, 8, 7)]
    assert reasons(rows, None, ()) == {9: ("damaged: left for a look",), 8: ("the newest",), 7: ()}


def test_protected_ones_are_shown_and_not_deleted(root: pathlib.Path, opened_shelf: OpenedShelf) -> None:
    Catalog(root).protect(40, "published")
    shelf = opened_shelf(root)
    row = shelf.row(40)
    assert row is not None
    assert row.protected
    assert "protected (published)" in next(row.kept for row in shelf.rows if row.step == 40)
    with pytest.raises(InputError, match="step 40 is protected"):
        actions.delete(shelf, 40)
    Catalog(root).unprotect(40)
    assert "is deleted" in actions.delete(shelf, 40)


def test_text_and_page_escape_what_a_checkpoint_says(root: pathlib.Path, shelves: Any) -> None:
    evil = "<script>alert(1)</script>\x1b[31m"
    shelves.write(root / "step-00000060", {evil: (1,)}, step=60, metadata={evil: evil, "metrics": {evil: 1.0}})
    browser = CheckpointBrowser(root, step=60)
    kept = browser._still(True)
    assert "<script" not in kept["text/html"]
    assert "\x1b" not in kept["text/plain"] + kept["text/html"]
    assert "&lt;script&gt;" in kept["text/html"]


def test_browsing_needs_no_ui_and_no_torch(root: pathlib.Path) -> None:
    code = (
        "import sys; from sgpu.widgets import CheckpointBrowser\n"
        f"b = CheckpointBrowser({str(root)!r}, step=40); str(b)\n"
        "from sgpu.widgets.checkpoints.values import look_at; o = b.shelf.check(40)\n"
        "print(look_at(b.shelf.store, o, 'model.embed.weight').norm)\n"
        "print([m for m in ('IPython', 'anywidget', 'ipywidgets', 'mlflow', 'torch') if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.startswith("102.05")
    assert told.endswith("[]\n")


def test_the_opened_step_is_of_the_cheap_check(root: pathlib.Path, opened_shelf: OpenedShelf) -> None:
    shelf = opened_shelf(root)
    opened = shelf.check(50)
    assert opened == open_checkpoint(shelf.store, "step-00000050")
