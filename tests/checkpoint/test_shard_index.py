"""Checkpoints of so many shards that each rank lists its own: the same values back, in any world."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from sgpu.checkpoint import Catalog, VolumeReader, find_latest_valid
from sgpu.checkpoint.writing import shard_index
from sgpu.contract.errors import CheckpointCorruptError

# Shards, and tensors that one rank writes whole; every checkpoint counts as one of too many shards.
SAVE = """
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from sgpu.checkpoint.writing import shard_index
from sgpu.checkpoint.stores.posix import PosixStore
shard_index.MOST_LISTED = 0
torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 6))
if world > 1:
    fully_shard(inner, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(inner.parameters())
box = {"w": torch.zeros(5), "n": 1}
state = {"model": inner, "optimizer": optimizer, "box": box}


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def restore(step):
    with Checkpointer(CheckpointPolicy(), state, store=PosixStore(pathlib.Path(ROOT))) as checkpointer:
        assert checkpointer.restore().step == step
"""
FIRST = (
    SAVE
    + """
inner(torch.randn(4, 6)).sum().backward()
optimizer.step()
box["w"].fill_(3)
with Checkpointer(CheckpointPolicy(), state, store=PosixStore(pathlib.Path(ROOT))) as checkpointer:
    checkpointer.save(1)
kept = {name: full(value).clone() for name, value in inner.state_dict().items()}
if rank == 0:
    torch.save(kept, ROOT + ".pt")
with torch.no_grad():
    for parameter in inner.parameters():
        parameter.zero_()
box["w"].zero_()
restore(1)
for name, value in inner.state_dict().items():
    assert torch.equal(full(value), kept[name]), name
assert box["w"].eq(3).all()
dist.destroy_process_group()
"""
)
AGAIN = (
    SAVE
    + """
kept = torch.load(ROOT + ".pt")
restore(1)
for name, value in inner.state_dict().items():
    assert torch.equal(full(value), kept[name]), name
if world > 1:
    dist.destroy_process_group()
"""
)


@pytest.fixture
def root(tmp_path: pathlib.Path, run_ok: Callable[..., list[str]]) -> pathlib.Path:
    run_ok(FIRST, 3)
    return tmp_path / "root"


def test_the_same_comes_back_in_any_world(root: pathlib.Path, run_ok: Callable[..., list[str]]) -> None:
    for world in (1, 2):
        run_ok(AGAIN, world)


def test_it_is_looked_at_without_reading_the_ranks_files(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = root / "step-00000001"
    index = sorted(path.name for path in folder.glob("*.index"))
    assert index == ["__0.index", "__1.index", "__2.index"]
    assert b'"sgpu.checkpoint/2"' in (folder / "manifest.json").read_bytes()
    catalog = Catalog(root)
    assert find_latest_valid(root) == str(folder)
    assert catalog.verify(1, deep=True).ok
    told = {tensor.name: tensor for tensor in catalog.inspect(1).tensors}
    assert (told["model.0.weight"].shape, told["model.0.weight"].shards) == ((10, 6), 3)
    assert (told["box.w"].shape, told["box.w"].shards) == ((5,), 1)
    exported = catalog.export(1, tmp_path / "out.safetensors", part="model")
    from safetensors.torch import load_file

    assert load_file(exported)["0.weight"].shape == (10, 6)
    assert catalog.diff(1, 1).values_changed == ()


@pytest.mark.parametrize("how", ["missing", "cut", "flipped"])
def test_a_damaged_file_of_one_rank_is_noticed(how: str, root: pathlib.Path) -> None:
    path = root / "step-00000001" / "__1.index"
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    else:
        content[9] ^= 1
        path.write_bytes(content[:-1] if how == "cut" else content)
    told = Catalog(root).verify(1, deep=True)
    assert not told.ok
    assert "__1.index" in told.problems[0]
    with pytest.raises(CheckpointCorruptError, match=r"__1\.index"):
        Catalog(root).diff(1, 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_it_through_us_and_by_itself_says_what_is_missing(root: pathlib.Path) -> None:
    kept = torch.load(f"{root}.pt")
    live = {"model.0.weight": torch.zeros(10, 6), "box.w": torch.zeros(5)}
    dcp.load(live, storage_reader=VolumeReader(root / "step-00000001"))
    assert torch.equal(live["model.0.weight"], kept["0.weight"])
    assert live["box.w"].eq(3).all()
    whole = {"box.w": torch.zeros(5)}
    dcp.load(whole, storage_reader=FileSystemReader(root / "step-00000001"))
    assert whole["box.w"].eq(3).all()
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.0\.weight"):
        dcp.load(live, storage_reader=FileSystemReader(root / "step-00000001"))


def test_neighbours_are_asked_before_others_and_each_once() -> None:
    groups = list(shard_index._groups(100, (3, 100)))
    assert groups[0] == [3]
    assert groups[1] == [0, 1, 2, *range(4, 12)]
    assert sorted(rank for group in groups for rank in group) == list(range(100))
    assert list(shard_index._groups(1, (0, 4))) == [[0]]
    assert next(iter(shard_index._groups(100, (1, 4)))) == [25]
    assert list(shard_index._groups(3, None)) == [[0, 1, 2]]
