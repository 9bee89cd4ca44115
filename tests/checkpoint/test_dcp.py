"""VolumeWriter and VolumeReader with plain DCP, and with stock files both ways."""

from __future__ import annotations

import pathlib
import random
import shutil
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from sgpu.checkpoint import Catalog, UCVolumeReader, UCVolumeWriter, VolumeReader, VolumeWriter, find_latest_valid
from sgpu.contract.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

DTYPES = [torch.bool, torch.int8, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64,
          torch.complex64, torch.float8_e4m3fn, torch.uint8]  # fmt: skip
SHAPES = [(), (0,), (0, 5), (1,), (3,), (6,), (4, 3, 2)]


def random_state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    state: dict[str, Any] = {
        f"{dtype}{shape}": torch.randint(0, 2, shape).to(dtype) for dtype in DTYPES for shape in SHAPES
    }
    base = torch.randn(64, 8)
    state["transposed"] = base[:4, :3].t()
    state["sliced"] = base[::2, 1:3]
    state["conj"] = torch.randn(3, dtype=torch.complex64).conj()
    state["nested"] = {"list": [torch.randn(2), 5], "text": f"seed {seed}", "number": seed}
    return state


def blank(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    return [blank(value) for value in state] if isinstance(state, list) else None


def raw(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), bytes(plain.numpy()))
    if isinstance(value, dict):
        return {key: raw(item) for key, item in value.items()}
    return [raw(item) for item in value] if isinstance(value, list) else value


Maker = Callable[[Any], Any]
WAYS = {
    "ours to ours": (VolumeWriter, VolumeReader),
    "ours to stock": (VolumeWriter, FileSystemReader),
    "stock to ours": (FileSystemWriter, VolumeReader),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_byte_comes_back(way: str, tmp_path: pathlib.Path) -> None:
    writer, reader = WAYS[way]
    state = random_state(1)
    dcp.save(state, storage_writer=writer(str(tmp_path / "step-7")))
    live = blank(state)
    dcp.load(live, storage_reader=reader(str(tmp_path / "step-7")))
    assert raw(live) == raw(state)
    assert find_latest_valid(tmp_path) == str(tmp_path / "step-7")


def test_a_view_is_saved_without_what_it_was_cut_from(tmp_path: pathlib.Path) -> None:
    dcp.save({"small": torch.randn(1000, 1000)[:2, :2]}, storage_writer=VolumeWriter(tmp_path / "step-1"))
    assert (tmp_path / "step-1" / "__0_0.distcp").stat().st_size < 5000


def test_a_url_and_the_familiar_names(tmp_path: pathlib.Path) -> None:
    url = f"memory://{uuid.uuid4()}/step-3"
    dcp.save({"w": torch.arange(5)}, storage_writer=UCVolumeWriter(url))
    live = {"w": torch.zeros(5, dtype=torch.int64)}
    dcp.load(live, storage_reader=UCVolumeReader(url))
    assert live["w"].tolist() == [0, 1, 2, 3, 4]
    assert Catalog(url.rpartition("/")[0]).verify(3, deep=True).ok


def test_checkpoint_id_is_as_good_as_a_url(tmp_path: pathlib.Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "step-1"), storage_writer=VolumeWriter())
    live = {"w": torch.zeros(2)}
    dcp.load(live, checkpoint_id=str(tmp_path / "step-1"), storage_reader=VolumeReader())
    assert live["w"].tolist() == [1, 1]


def test_a_committed_checkpoint_is_never_written_over(tmp_path: pathlib.Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=VolumeWriter(tmp_path / "step-1"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-1").iterdir()}
    with pytest.raises(BaseException, match="already holds a committed checkpoint"):
        dcp.save({"w": torch.zeros(2)}, storage_writer=VolumeWriter(tmp_path / "step-1"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-1").iterdir()} == before


def test_what_a_died_save_left_is_replaced_not_mixed(tmp_path: pathlib.Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=VolumeWriter(tmp_path / "step-1"))
    (tmp_path / "step-1" / ".metadata").unlink()
    dcp.save({"w": torch.full((2,), 5.0)}, storage_writer=VolumeWriter(tmp_path / "step-1"))
    live = {"w": torch.zeros(2)}
    dcp.load(live, storage_reader=VolumeReader(tmp_path / "step-1"))
    assert live["w"].tolist() == [5, 5]


@pytest.mark.parametrize("cast", [False, True])
def test_another_dtype_is_a_mismatch_unless_asked_for(cast: bool, tmp_path: pathlib.Path) -> None:
    dcp.save({"w": torch.full((2,), 1.001)}, storage_writer=VolumeWriter(tmp_path / "step-1"))
    live = {"w": torch.zeros(2, dtype=torch.bfloat16)}
    if cast:
        dcp.load(live, storage_reader=VolumeReader(tmp_path / "step-1", cast=True))
        assert live["w"].tolist() == [1, 1]
        return
    with pytest.raises(BaseException, match="was saved as float32 and would be loaded into bfloat16"):
        dcp.load(live, storage_reader=VolumeReader(tmp_path / "step-1"))
    assert live["w"].tolist() == [0, 0]


def test_every_flipped_bit_is_caught_and_nothing_is_overwritten(tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    state = {"a": torch.randn(50, 7), "b": torch.randn(3), "c": {"note": "text", "n": 4}}
    dcp.save(state, storage_writer=VolumeWriter(tmp_path / "good"))
    draw = random.Random(0)
    files = sorted(path.name for path in (tmp_path / "good").iterdir())
    assert files == [".metadata", "__0_0.distcp", "manifest.json"]
    for trial in range(60):
        folder = tmp_path / f"step-{trial}"
        shutil.copytree(tmp_path / "good", folder)
        name = files[trial % 3]
        content = bytearray((folder / name).read_bytes())
        bit = draw.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(content)
        live = blank(state)
        with pytest.raises(BaseException) as caught:
            dcp.load(live, storage_reader=VolumeReader(folder))
        assert name in str(caught.value)
        if name == "__0_0.distcp":
            assert any(f"damaged: {tensor} in" in str(caught.value) for tensor in ("a", "b", "c.note", "c.n"))
        assert raw(live) == raw(blank(state))


def test_a_truncated_shard_is_told_before_anything_is_overwritten(tmp_path: pathlib.Path) -> None:
    dcp.save({"a": torch.ones(100), "b": torch.ones(100)}, storage_writer=VolumeWriter(tmp_path / "step-1"))
    shard = tmp_path / "step-1" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-10])
    live = {"a": torch.zeros(100), "b": torch.zeros(100)}
    with pytest.raises(BaseException, match=r"__0_0\.distcp: it has .* bytes and should have"):
        dcp.load(live, storage_reader=VolumeReader(tmp_path / "step-1"))
    assert not live["a"].any()


def test_a_writer_without_a_place_says_so() -> None:
    with pytest.raises(CheckpointError, match="no place to write"):
        _ = VolumeWriter().checkpoint_id


SCRIPT = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
group = dist.new_group(backend="gloo")
state = {"w": torch.arange(6.) , f"own.{rank}": torch.full((3,), float(rank))}
future = dcp.async_save(state, storage_writer=VolumeWriter(ROOT + "/step-1"), process_group=group)
future.result()
for reader in (VolumeReader, FileSystemReader):
    live = {"w": torch.zeros(6), "own.0": torch.zeros(3), "own.1": torch.zeros(3)}
    dcp.load(live, storage_reader=reader(ROOT + "/step-1"))
    assert live["w"].tolist() == [0, 1, 2, 3, 4, 5] and live["own.1"].tolist() == [1, 1, 1], live
assert Catalog(ROOT).verify(1, deep=True).ok and Catalog(ROOT).inspect(1).world_size == 2
dist.destroy_process_group()
"""


def test_async_save_on_two_ranks(run_ok: Callable[..., list[str]]) -> None:
    run_ok(SCRIPT, 2)
