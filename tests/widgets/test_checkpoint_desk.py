"""What travels between the checkpoints and a browser, without a browser."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from sgpu.checkpoint import Catalog
from sgpu.widgets.checkpoints.browser import CheckpointBrowser as Browser
from sgpu.widgets.checkpoints.desk import Desk
from sgpu.widgets.checkpoints.rows import Shelf
from sgpu.widgets.checkpoints.widget import CheckpointWidget
from sgpu.widgets.errands import BackgroundErrands

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OpenedShelf = Callable[[Any], Shelf]


class Now:
    """Errands done at once."""

    def do(self, errand: Callable[[], None]) -> None:
        errand()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def desk(root: pathlib.Path, opened_shelf: OpenedShelf) -> Any:
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


def test_choosing_one_tells_its_tree_its_facts_and_how_to_go_on(desk: Any, root: pathlib.Path) -> None:
    desk.hear({"kind": "choose", "step": 40})
    detail = last(desk, "detail")
    facts = dict(detail["facts"])
    assert facts["data position"] == "epoch 0, batch 40"
    assert facts["checksums"] == "every byte"
    assert "torch" in facts["versions"]
    assert f"Catalog('{root}').copy(40, '{root}-from-40')" in detail["resume"]["code"]
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


def test_a_browser_protects_and_verifies_all(desk: Any, root: pathlib.Path) -> None:
    desk.hear({"kind": "hello"})
    desk.hear({"kind": "protect", "step": 10, "reason": "<b>best\x1b[31m</b>"})
    row = next(row for row in last(desk, "rows")["rows"] if row[0] == 10)
    assert (row[3], row[-2]) == (1, "protected (<b>best</b>)")
    desk.hear({"kind": "unprotect", "step": 10})
    assert Catalog(root).protected() == {}
    desk.hear({"kind": "verify all"})
    assert last(desk, "job")["words"].startswith("1 of 5 checkpoints damaged (step 30)")
    assert last(desk, "table")["formats"][2] == ["hf", "-hf"]


@pytest.mark.parametrize(
    "content",
    [None, [], "hello", {}, {"kind": []}, {"kind": "choose"}, {"kind": "choose", "step": "50"},
     {"kind": "choose", "step": 51}, {"kind": "check", "steps": [None, "x", 1e9]}, {"kind": "lines", "from": -5},
     {"kind": "lines", "from": -5, "count": 10**9}, {"kind": "values", "name": {"a": 1}}, {"kind": "toggle"},
     {"kind": "compare", "first": 1}, {"kind": "compare", "first": 1, "second": 2}, {"kind": "verify", "step": True},
     {"kind": "delete", "step": 50, "sure": 1}, {"kind": "export", "step": 50}, {"kind": "find", "text": None},
     {"kind": "protect"}, {"kind": "unprotect", "step": 50}, {"kind": "resume", "step": 50, "sure": True}],
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


def test_a_thousand_rows_are_a_small_message(tmp_path: pathlib.Path, shelves: Any, opened_shelf: OpenedShelf) -> None:
    shelves.many(tmp_path / "many", 300)
    said: list[dict[str, Any]] = []
    desk = Desk(opened_shelf(tmp_path / "many"), said.append, quick=Now(), slow=Now())
    desk.start()
    desk.hear({"kind": "hello"})
    assert len(json.dumps(said[-1])) < 300 * 160
    desk.hear({"kind": "lines", "from": 0, "count": 10**6})
    assert len(said[-1].get("lines", [])) <= 300


def test_a_store_that_breaks_is_told_and_asked_again_only_when_somebody_looks(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch, opened_shelf: OpenedShelf
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
