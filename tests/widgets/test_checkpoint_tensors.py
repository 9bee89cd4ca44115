"""A checkpoint's tensors: the tree, and the numbers of one."""

from __future__ import annotations

import os
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from sgpu.contract.errors import CheckpointCorruptError
from sgpu.widgets import CheckpointBrowser
from sgpu.widgets.checkpoints import values as checkpoint_values
from sgpu.widgets.checkpoints.rows import Shelf
from sgpu.widgets.checkpoints.tensors import TensorTree
from sgpu.widgets.checkpoints.values import look_at

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

OpenedShelf = Callable[[Any], Shelf]


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


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.uint8, torch.bool,
     torch.complex64, torch.float8_e5m2],
)  # fmt: skip
def test_values_are_those_of_torch(tmp_path: pathlib.Path, dtype: torch.dtype, opened_shelf: OpenedShelf) -> None:
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


def test_nan_and_infinities_are_counted_and_do_not_hide_the_rest(
    tmp_path: pathlib.Path, opened_shelf: OpenedShelf
) -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, 3.0])
    dcp.save({"w": tensor, "n": tensor[:1]}, checkpoint_id=tmp_path / "d" / "step_1", no_dist=True)
    shelf = opened_shelf(tmp_path / "d")
    opened = shelf.check(1)
    assert opened is not None
    values = look_at(shelf.store, opened, "w")
    assert (values.nans, values.infinities, values.low, values.high) == (1, 2, 1.0, 3.0)
    assert look_at(shelf.store, opened, "n").nans == 1


def test_a_large_tensor_is_sampled_from_end_to_end(
    tmp_path: pathlib.Path, shelves: Any, monkeypatch: pytest.MonkeyPatch, opened_shelf: OpenedShelf
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


def test_a_flipped_bit_is_told_before_any_number_is_shown(
    root: pathlib.Path, shelves: Any, opened_shelf: OpenedShelf
) -> None:
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
