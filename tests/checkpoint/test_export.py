"""Exports: what other tools read is what was saved, to the bit."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.contract.errors import CheckpointCorruptError, InputError

CONFIG = {"model_type": "tiny", "hidden_size": 8, "tie_word_embeddings": True}


class Tiny(nn.Module):
    """Named as these libraries name such models; the head is the input embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed_tokens": nn.Embedding(16, 8), "norm": nn.LayerNorm(8)})
        self.layers = nn.ModuleList([nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(3)])
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.model["embed_tokens"].weight
        self.register_buffer("seen", torch.tensor(7))


@pytest.fixture
def tiny() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


@pytest.fixture
def root(tiny: Tiny, tmp_path: pathlib.Path) -> pathlib.Path:
    optimizer = torch.optim.AdamW(tiny.parameters())
    state = {"model": tiny, "optimizer": optimizer, "box": {"w": torch.ones(3)}}
    with Checkpointer(CheckpointPolicy(), state, store=PosixStore(tmp_path / "root")) as checkpointer:
        checkpointer.save(1)
    return tmp_path / "root"


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_one_file_holds_every_tensor_under_its_own_name(root: pathlib.Path, tiny: Tiny, tmp_path: pathlib.Path) -> None:
    path = Catalog(root).export(1, tmp_path / "all.safetensors")
    expected = {f"model.{name}": tensor for name, tensor in tiny.state_dict().items()} | {"box.w": torch.ones(3)}
    same(load_file(path), expected)
    model = Catalog(root).export(1, tmp_path / "model.safetensors", part="model")
    same(load_file(model), tiny.state_dict())
    assert list(tmp_path.glob(".*")) == []


def test_safetensors_need_no_package(
    root: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    path = pathlib.Path(Catalog(root).export(1, tmp_path / "all.safetensors"))
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert header["__metadata__"] == {"format": "pt"}
    assert header["box.w"]["dtype"] == "F32"
    assert (8 + length) % 8 == 0


def test_a_hugging_face_folder(root: pathlib.Path, tiny: Tiny, tmp_path: pathlib.Path) -> None:
    """Tied weights once, under the name of the input embedding, as their loaders tie the rest."""
    folder = pathlib.Path(Catalog(root).export(1, tmp_path / "hf", format="hf", config=CONFIG))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    expected = tiny.state_dict()
    del expected["lm_head.weight"]
    same(load_file(folder / "model.safetensors"), expected)
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    again = Tiny()
    told = again.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert (told.missing_keys, told.unexpected_keys) == (["lm_head.weight"], [])
    assert torch.equal(again.lm_head.weight, tiny.lm_head.weight)


def test_a_folder_of_several_files_has_an_index(root: pathlib.Path, tiny: Tiny, tmp_path: pathlib.Path) -> None:
    config = tmp_path / "given.json"
    config.write_text(json.dumps(CONFIG))
    folder = pathlib.Path(Catalog(root).export(1, tmp_path / "hf", format="hf", config=config, shard_bytes=300))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert count > 2
    assert files == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", *files, "model.safetensors.index.json"]
    found: dict[str, torch.Tensor] = {}
    for file in files:
        inside = load_file(folder / file)
        assert {index["weight_map"][name] for name in inside} == {file}
        assert len(inside) == 1 or sum(tensor.nbytes for tensor in inside.values()) <= 300
        found |= inside
    expected = tiny.state_dict()
    del expected["lm_head.weight"]
    same(found, expected)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize("kind", ["safetensors", "torch", "hf"])
def test_names_can_be_changed_and_left_out(kind: str, root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    rename: dict[str, str] = {r"^layers\.(\d+)": r"model.blocks.\1", r"^model\.norm": "final_norm"}
    path = pathlib.Path(Catalog(root).export(1, tmp_path / "a", format=kind, part="model", rename=rename))
    file = path / "model.safetensors" if kind == "hf" else path
    found = torch.load(file, weights_only=True) if kind == "torch" else load_file(file)
    assert {"model.blocks.0.weight", "model.blocks.2.bias", "final_norm.weight", "seen"} <= found.keys()
    only = Catalog(root).export(
        1, tmp_path / "b", format="torch", rename=lambda name: name.upper() if name.startswith("box.") else None
    )
    assert torch.load(only, weights_only=True).keys() == {"BOX.W"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "zip"}, "format must be one of safetensors, torch, hf"),
        ({"format": "hf", "part": "other"}, r"expected tensors of part 'other'; it has parts \['box', 'model'\]"),
        ({"rename": {r"^.*$": "same"}}, "rename gives 'same' to both"),
        ({"format": "hf", "shard_bytes": 0}, "shard_bytes must be a whole number above 0"),
        ({"config": {"a": 1}}, 'config is for format="hf" only'),
    ],
)
def test_what_cannot_be_is_refused(options: Any, said: str, root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(InputError, match=said):
        Catalog(root).export(1, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="exists already"):
        Catalog(root).export(1, tmp_path / "out", format="hf")


def test_a_dtype_without_a_name_there_is_refused(tmp_path: pathlib.Path) -> None:
    state = {"box": {"w": torch.ones(3, dtype=torch.complex128)}}
    with Checkpointer(CheckpointPolicy(), state, store=PosixStore(tmp_path / "root")) as checkpointer:
        checkpointer.save(1)
    with pytest.raises(InputError, match=r"no name for complex128, the dtype of box\.w"):
        Catalog(tmp_path / "root").export(1, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "root"]


@pytest.mark.parametrize("kind", ["safetensors", "torch", "hf"])
def test_damaged_bytes_are_not_exported(kind: str, root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    shard = root / "step-00000001" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    at = content.index(bytes(tiny_norm()))
    content[at + 3] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointCorruptError, match=r"model\.model\.norm\.weight in __0_0"):
        Catalog(root).export(1, tmp_path / "out", format=kind)
    assert list(tmp_path.iterdir()) == [root]


def tiny_norm() -> bytearray:
    return bytearray(torch.ones(8).numpy().tobytes())
