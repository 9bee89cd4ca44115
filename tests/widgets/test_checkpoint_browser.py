"""The checkpoint browser without a browser: rows, reasons, the tree, values, and what travels."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from sgpu.checkpoint import Catalog
from sgpu.checkpoint.keeping.choose import open_checkpoint
from sgpu.contract.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, InputError
from sgpu.contract.policies import CheckpointPolicy
from sgpu.contract.rundir import RunDir
from sgpu.contract.spec import read_spec
from sgpu.widgets import CheckpointBrowser, checkpoint_actions, checkpoint_values
from sgpu.widgets.checkpoint_browser import CheckpointBrowser as Browser
from sgpu.widgets.checkpoint_desk import Desk
from sgpu.widgets.checkpoint_place import find_place
from sgpu.widgets.checkpoint_rows import CheckpointRow, Shelf, curves_of, reasons
from sgpu.widgets.checkpoint_tensors import TensorTree
from sgpu.widgets.checkpoint_values import look_at
from sgpu.widgets.checkpoint_widget import CheckpointWidget
from sgpu.widgets.errands import BackgroundErrands

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def shelves() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("shelves", pathlib.Path(__file__).parent / "shelves.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: pathlib.Path, shelves: Any) -> pathlib.Path:
    """Steps 10 to 50, one of which lost a byte."""
    folder = tmp_path / "root"
    shelves.many(folder, 5)
    shard = folder / "step-00000030" / shelves.SHARD
    shard.write_bytes(shard.read_bytes()[:-1])
    return folder


def opened_shelf(root: pathlib.Path) -> Shelf:
    shelf = Shelf(find_place(root))
    shelf.refresh()
    return shelf


# ---- rows


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


def test_the_older_attempt_is_shown_where_the_newer_is_damaged(root: pathlib.Path, shelves: Any) -> None:
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


def test_plain_dcp_folders_are_shown_as_without_checksums(tmp_path: pathlib.Path) -> None:
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


def test_protected_ones_are_shown_and_not_deleted(root: pathlib.Path) -> None:
    Catalog(root).protect(40, "published")
    shelf = opened_shelf(root)
    row = shelf.row(40)
    assert row is not None
    assert row.protected
    assert "protected" in next(row.kept for row in shelf.rows if row.step == 40)
    with pytest.raises(InputError, match="step 40 is protected"):
        checkpoint_actions.delete(shelf, 40)
    Catalog(root).unprotect(40)
    assert "is deleted" in checkpoint_actions.delete(shelf, 40)


# ---- the tree


@given(names=st.sets(st.text("ab.1\U0010ffff", max_size=8), max_size=40))
def test_opening_everything_shows_every_tensor_once(names: set[str]) -> None:
    tree = TensorTree({name: len(name) for name in names})
    for _ in range(12):
        for line in list(tree.lines()):
            if line.group and not line.opened:
                tree.toggle(line.name)
    shown = [line.name for line in tree.lines() if not line.group]
    assert sorted(shown) == sorted(names)
    top = tree.children()
    assert sum(line.tensors for line in top) == len(names)
    assert sum(line.size_bytes for line in top) == sum(map(len, names)) == tree.size_bytes


def test_layers_come_in_the_order_of_their_numbers_and_groups_of_one_are_not_shown() -> None:
    tree = TensorTree({f"model.layers.{n}.{part}": 4 for n in (10, 2, 1) for part in ("w", "b")} | {"model.norm.w": 8})
    assert [line.label for line in tree.children("model.layers.")] == ["1", "2", "10"]
    assert [(line.label, line.group) for line in tree.children("model.")] == [("layers", True), ("norm.w", False)]
    tree.find("LAYERS.2")
    assert [line.name for line in tree.lines()] == ["model.layers.2.b", "model.layers.2.w"]
    tree.find("")
    assert tree.lines()[0].label == "model"


# ---- values


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.uint8, torch.bool,
     torch.complex64, torch.float8_e5m2],
)  # fmt: skip
def test_values_are_those_of_torch(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, -2.0, 3.0, 0.5, 100.0]).abs().to(dtype).reshape(2, 3)
    dcp.save({"w": tensor}, checkpoint_id=tmp_path / "d" / "step_1", no_dist=True)
    shelf = opened_shelf(tmp_path / "d")
    opened = shelf.check(1)
    assert opened is not None
    values = look_at(shelf.store, opened, "w")
    expected = tensor.abs().to(torch.float64) if dtype.is_complex else tensor.to(torch.float64)
    assert values.norm == pytest.approx(float(torch.linalg.vector_norm(expected)))
    assert (values.low, values.high) == (float(expected.min()), float(expected.max()))
    assert values.mean == pytest.approx(float(expected.mean()))
    assert sum(values.bins) == 6
    assert values.zeros == int((expected == 0).sum())


def test_nan_and_infinities_are_counted_and_do_not_hide_the_rest(tmp_path: pathlib.Path) -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, 3.0])
    dcp.save({"w": tensor, "n": tensor[:1]}, checkpoint_id=tmp_path / "d" / "step_1", no_dist=True)
    shelf = opened_shelf(tmp_path / "d")
    opened = shelf.check(1)
    assert opened is not None
    values = look_at(shelf.store, opened, "w")
    assert (values.nans, values.infinities, values.low, values.high) == (1, 2, 1.0, 3.0)
    assert look_at(shelf.store, opened, "n").nans == 1


def test_a_large_tensor_is_sampled_from_end_to_end(
    tmp_path: pathlib.Path, shelves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelves.write(tmp_path / "r" / "step-00000001", {"w": (100_000,)}, step=1)
    monkeypatch.setattr(checkpoint_values, "READ_BYTES", 40_000)
    monkeypatch.setattr(checkpoint_values, "_PIECE_BYTES", 4_000)
    shelf = opened_shelf(tmp_path / "r")
    opened = shelf.check(1)
    assert opened is not None
    reads: list[int] = []
    original = shelf.store.read

    def counted(path: str, offset: int = 0, length: int | None = None) -> bytes:
        found = original(path, offset, length)
        reads.append(len(found))
        return found

    monkeypatch.setattr(shelf.store, "read", counted)
    values = look_at(shelf.store, opened, "w")
    assert sum(reads) == 40_000
    assert (values.count, values.read, values.checked) == (100_000, 10_000, False)
    assert values.low < 1_000
    assert values.high > 90_000
    whole = sum(n * n for n in range(100_000)) ** 0.5
    assert values.norm == pytest.approx(whole, rel=0.05)


def test_a_flipped_bit_is_told_before_any_number_is_shown(root: pathlib.Path, shelves: Any) -> None:
    shard = root / "step-00000050" / shelves.SHARD
    content = bytearray(shard.read_bytes())
    content[70] ^= 4
    shard.write_bytes(content)
    shelf = opened_shelf(root)
    opened = shelf.check(50)
    assert opened is not None
    with pytest.raises(CheckpointCorruptError, match=r"model\.embed\.weight in __0_0\.distcp: its bytes are not"):
        look_at(shelf.store, opened, "model.embed.weight")


class _Trap:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch trapped",)


def test_looking_at_a_hostile_checkpoint_runs_nothing(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (root / "step-00000050" / ".metadata").write_bytes(pickle.dumps(_Trap()))
    (root / "step-00000050" / "manifest.json").unlink()
    browser = CheckpointBrowser(root, step=50)
    text = str(browser)
    assert "not on the list of names" in text
    assert browser.rows[0].state == "damaged"
    assert not (tmp_path / "trapped").exists()
    pickle.loads(pickle.dumps(_Trap()))
    assert (tmp_path / "trapped").exists(), "the trap works"


# ---- actions


def test_the_last_valid_one_is_not_deleted(root: pathlib.Path) -> None:
    shelf = opened_shelf(root)
    for step in (50, 40, 30, 20):
        assert checkpoint_actions.delete(shelf, step) == f"step {step} is deleted (1 folder)"
    with pytest.raises(InputError, match="step 10 is the last valid checkpoint; it is not deleted"):
        checkpoint_actions.delete(shelf, 10)
    with pytest.raises(CheckpointNotFoundError):
        checkpoint_actions.delete(shelf, 20)
    assert sorted(path.name for path in root.iterdir()) == ["step-00000010"]


def test_what_a_running_run_was_restored_from_is_not_deleted(run: Any, shelves: Any) -> None:
    shelves.many(run.dir.checkpoints, 3)
    run.event("restored", step=20)
    run.status("RUNNING")
    shelf = Shelf(find_place(run.dir))
    with pytest.raises(InputError, match="resumed from step 20"):
        checkpoint_actions.delete(shelf, 20)
    run.status("FAILED", ended=run.created + 9)
    assert "deleted" in checkpoint_actions.delete(shelf, 20)


def test_verifying_reads_every_byte(root: pathlib.Path, shelves: Any) -> None:
    shelf = opened_shelf(root)
    assert checkpoint_actions.verify(shelf, 50) == "step 50: every byte is as it was written"
    shard = root / "step-00000050" / shelves.SHARD
    content = bytearray(shard.read_bytes())
    content[70] ^= 4
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"step 50 is damaged: model\.embed\.weight in __0_0\.distcp"):
        checkpoint_actions.verify(shelf, 50)
    assert shelf.rows[0].state == "damaged"


def test_only_the_step_that_a_run_would_take_is_resumed(run: Any, shelves: Any) -> None:
    shelves.many(run.dir.checkpoints, 3)
    run.status("FAILED", ended=run.created + 9)
    shelf = Shelf(find_place(run.dir))
    shelf.refresh()
    with pytest.raises(InputError, match="would go on from step 30"):
        checkpoint_actions.resume(shelf, 20)


# ---- what travels


class Now:
    """Errands done at once."""

    def do(self, errand: Callable[[], None]) -> None:
        errand()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def desk(root: pathlib.Path) -> Any:
    said: list[dict[str, Any]] = []

    def say(message: dict[str, Any]) -> None:
        said.append(json.loads(json.dumps(message, allow_nan=False)))

    made = Desk(opened_shelf(root), say, quick=Now(), slow=Now())
    made.said = said  # type: ignore[attr-defined]
    return made


def last(desk: Any, kind: str) -> dict[str, Any]:
    return next(message for message in reversed(desk.said) if message["kind"] == kind)


def test_the_table_comes_first_and_then_what_was_found_inside(desk: Any) -> None:
    desk.hear({"kind": "hello"})
    assert [row[:2] for row in last(desk, "table")["rows"]] == [[step, "unchecked"] for step in (50, 40, 30, 20, 10)]
    desk.start()
    assert {row[0]: row[1] for row in last(desk, "rows")["rows"]}[30] == "damaged"
    assert last(desk, "rows")["summary"].startswith("5 checkpoints, 1 damaged, ")


def test_choosing_one_tells_its_tree_its_facts_and_how_to_go_on(desk: Any) -> None:
    desk.hear({"kind": "choose", "step": 40})
    detail = last(desk, "detail")
    facts = dict(detail["facts"])
    assert facts["data position"] == "epoch 0, batch 40"
    assert facts["checksums"] == "every byte"
    assert "torch" in facts["versions"]
    assert "shutil.copytree" in detail["resume"]["code"]
    assert detail["tensors"] == "13 tensors, 176 B"
    lines = last(desk, "lines")
    assert lines["lines"][0][1] == "model"
    group = next(line for line in lines["lines"] if line[3] == 2 and line[1] == "attn")
    desk.hear({"kind": "toggle", "name": group[0]})
    assert last(desk, "lines")["total"] < lines["total"]
    desk.hear({"kind": "values", "name": "model.embed.weight"})
    assert last(desk, "values")["words"][0] == "norm 102.1"


def test_a_damaged_one_says_why_and_holds_nothing_up(desk: Any) -> None:
    desk.hear({"kind": "choose", "step": 30})
    assert "__0_0.distcp" in last(desk, "detail")["why"]
    desk.hear({"kind": "values", "name": "model.embed.weight"})
    desk.hear({"kind": "verify", "step": 30})
    assert last(desk, "job")["state"] == "failed"
    assert "step 30 is damaged" in last(desk, "job")["words"]
    desk.hear({"kind": "choose", "step": 20})
    assert last(desk, "detail")["step"] == 20


def test_comparing_two_tells_names_and_metrics(desk: Any, root: pathlib.Path, shelves: Any) -> None:
    shelves.write(root / "step-00000060", {"model.embed.weight": (8, 4), "new": (2,)}, step=60, scale=2.0)
    desk.hear({"kind": "refresh"})
    desk.hear({"kind": "compare", "first": 50, "second": 60})
    told = last(desk, "difference")
    groups = {title: (amount, names) for title, amount, names in told["groups"]}
    assert groups["only in step 60"] == (1, ["new"])
    assert groups["other values"] == (1, ["model.embed.weight"])
    assert groups["only in step 50"][0] == 12
    assert ["loss", "0.2", ""] in told["facts"]


def test_exports_go_where_they_are_told_and_say_what_is_wrong(desk: Any, tmp_path: pathlib.Path, root: Any) -> None:
    state = {"w": torch.arange(4.0)}
    dcp.save(state, checkpoint_id=root / "step_70", no_dist=True)
    desk.hear({"kind": "refresh"})
    target = tmp_path / "out.pt"
    desk.hear({"kind": "export", "step": 70, "path": f" {target} ", "format": "torch"})
    assert last(desk, "job")["state"] == "done"
    assert torch.load(target, weights_only=True)["w"].tolist() == [0, 1, 2, 3]
    for path, kind, said in ((target, "torch", "exists already"), ("", "torch", "name of the new file"),
                             (tmp_path / "x", "zip", "format must be")):  # fmt: skip
        desk.hear({"kind": "export", "step": 70, "path": str(path), "format": kind})
        assert last(desk, "job")["state"] == "failed"
        assert said in last(desk, "job")["words"]


def test_deleting_needs_a_yes(desk: Any, root: pathlib.Path) -> None:
    desk.hear({"kind": "delete", "step": 10})
    assert (root / "step-00000010").exists()
    desk.hear({"kind": "hello"})
    desk.hear({"kind": "delete", "step": 10, "sure": True})
    assert not (root / "step-00000010").exists()
    assert [row[0] for row in last(desk, "table")["rows"]] == [50, 40, 30, 20]


@pytest.mark.parametrize(
    "content",
    [None, [], "hello", {}, {"kind": []}, {"kind": "choose"}, {"kind": "choose", "step": "50"},
     {"kind": "choose", "step": 51}, {"kind": "check", "steps": [None, "x", 1e9]}, {"kind": "lines", "from": -5},
     {"kind": "lines", "from": -5, "count": 10**9}, {"kind": "values", "name": {"a": 1}}, {"kind": "toggle"},
     {"kind": "compare", "first": 1}, {"kind": "compare", "first": 1, "second": 2}, {"kind": "verify", "step": True},
     {"kind": "delete", "step": 50, "sure": 1}, {"kind": "export", "step": 50}, {"kind": "find", "text": None}],
)  # fmt: skip
def test_whatever_a_browser_sends_is_data(desk: Any, content: Any) -> None:
    names = sorted(path.name for path in pathlib.Path(desk.shelf.place.root).iterdir())
    desk.hear(content)
    desk.hear({"kind": "hello"})
    assert last(desk, "table")["rows"]
    assert sorted(path.name for path in pathlib.Path(desk.shelf.place.root).iterdir()) == names


def test_only_what_changed_is_told_again(desk: Any) -> None:
    desk.hear({"kind": "hello"})
    desk.start()
    before = len(desk.said)
    desk.hear({"kind": "check", "steps": [10]})
    assert len(desk.said) == before


def test_a_thousand_rows_are_a_small_message(tmp_path: pathlib.Path, shelves: Any) -> None:
    shelves.many(tmp_path / "many", 300)
    said: list[dict[str, Any]] = []
    desk = Desk(opened_shelf(tmp_path / "many"), said.append, quick=Now(), slow=Now())
    desk.start()
    desk.hear({"kind": "hello"})
    assert len(json.dumps(said[-1])) < 300 * 160
    desk.hear({"kind": "lines", "from": 0, "count": 10**6})
    assert len(said[-1].get("lines", [])) <= 300


def test_a_store_that_breaks_is_told_and_asked_again_only_when_somebody_looks(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[dict[str, Any]] = []
    sizes: list[int] = []
    waiting: list[Callable[[], None]] = []
    shelf = opened_shelf(root)
    quick = Now()
    monkeypatch.setattr(quick, "do", waiting.append)
    desk = Desk(shelf, said.append, quick=quick, slow=quick)

    def broken(folder: str) -> dict[str, int]:
        sizes.append(1)
        raise RuntimeError("the package of this store says no")

    monkeypatch.setattr(shelf.store, "sizes", broken)
    desk.start()
    with pytest.raises(RuntimeError):
        waiting.pop()()
    desk.tell_trouble(RuntimeError("the package of this store says no"))
    assert said[-1]["words"] == "RuntimeError: the package of this store says no"
    assert (len(sizes), waiting) == (1, [])
    monkeypatch.undo()
    desk = Desk(shelf, said.append, quick=Now(), slow=Now())
    desk.hear({"kind": "check", "steps": [50]})
    assert shelf.rows[0].state == "valid"


def test_the_widget_ends_with_its_threads(root: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(CheckpointWidget, "send", lambda self, content, buffers=None: sent.append(content))
    browser = Browser(root, step=20)
    widget = browser._exhibit.widget
    assert isinstance(widget, CheckpointWidget)
    widget.take({"kind": "hello"})
    assert sent[0]["kind"] == "table"
    widget.take({"kind": "keep"})
    widget._say({"kind": "late"})
    assert sent[-1]["kind"] != "late"


def test_errands_are_done_in_order_and_none_after_the_end() -> None:
    seen: list[Any] = []
    errands, ready = BackgroundErrands("test", seen.append), threading.Event()
    errands.do(lambda: seen.append(1))
    errands.do(lambda: {}["missing"])
    errands.do(lambda: seen.append(2))
    errands.do(ready.set)
    assert ready.wait(10)
    errands.close()
    errands.do(lambda: seen.append(3))
    assert seen[0] == 1
    assert isinstance(seen[1], KeyError)
    assert seen[2:] == [2]


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
        "from sgpu.widgets.checkpoint_values import look_at; o = b.shelf.check(40)\n"
        "print(look_at(b.shelf.store, o, 'model.embed.weight').norm)\n"
        "print([m for m in ('IPython', 'anywidget', 'ipywidgets', 'mlflow', 'torch') if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert told.startswith("102.05")
    assert told.endswith("[]\n")


def test_the_opened_step_is_of_the_cheap_check(root: pathlib.Path) -> None:
    shelf = opened_shelf(root)
    opened = shelf.check(50)
    assert opened == open_checkpoint(shelf.store, "step-00000050")
