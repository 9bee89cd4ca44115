"""Saving to a volume and loading from it with plain DCP calls, as the published guides show it, on two workers."""

from __future__ import annotations

import hashlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from sgpu.checkpoint import find_latest_valid
from sgpu.compat import distributed
from sgpu.compat.data import UCVolumeReader, UCVolumeWriter
from sgpu.contract.errors import CheckpointCorruptError, CheckpointError

pytestmark = pytest.mark.usefixtures("without_mlflow")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file by its name

LAST = 12


class Training:
    """A small model under DDP with its optimizer: what a notebook defines in a cell."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def one(self, step: int) -> float:
        inputs = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = self.model(inputs).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss)

    def state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}

    def load(self, state: dict[str, Any]) -> int:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(state["step"])

    def digest(self) -> str:
        found = hashlib.sha256()
        for value in self.model.state_dict().values():
            found.update(value.numpy().tobytes())
        return found.hexdigest()


def newest(root: str) -> str | None:
    """The folder of the highest step that holds a commit record."""
    complete = [folder for folder in pathlib.Path(root).glob("step_*") if (folder / ".metadata").is_file()]
    return str(max(complete, key=lambda folder: int(folder.name.split("_")[1]))) if complete else None


def train_and_save(root: str) -> dict[str, Any]:
    """Step 2 is saved while training waits, 9 and 10 in the background while it goes on."""
    dist.init_process_group(backend="cpu:gloo,cuda:nccl")
    training, losses, digests = Training(), [], {}
    pending = None
    for step in range(1, LAST + 1):
        losses.append(training.one(step))
        digests[step] = training.digest()
        writer = UCVolumeWriter(f"{root}/step_{step}")
        if step == 2:
            dcp.save(training.state(step), storage_writer=writer)
        elif step in (9, 10):
            if pending is not None:
                pending.result()
            pending = dcp.async_save(training.state(step), storage_writer=writer)
    assert pending is not None
    pending.result()
    return {"losses": losses, "digests": digests}


def resume(root: str) -> dict[str, Any]:
    dist.init_process_group(backend="cpu:gloo,cuda:nccl")
    training = Training()
    folder = newest(root)
    state = training.state(0)
    dcp.load(state, storage_reader=UCVolumeReader(folder))
    step = training.load(state)
    facts = {"folder": folder, "step": step, "loaded": training.digest()}
    facts["losses"] = [training.one(each) for each in range(step + 1, LAST + 1)]
    return {**facts, "digest": training.digest()}


def test_saved_while_waiting_or_in_the_background_and_resumed_to_the_bit(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "volume" / "checkpoints"
    first = distributed(gpus=2)(train_and_save).distributed(str(root))
    assert sorted(folder.name for folder in root.iterdir()) == ["step_10", "step_2", "step_9"]
    torn = root / "step_11"  # what a save that died leaves: shards, no commit record
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half a shard")
    second = distributed(gpus=2)(resume).distributed(str(root))
    for rank, (before, after) in enumerate(zip(first, second, strict=True)):
        assert after["folder"] == str(root / "step_10"), rank
        assert after["step"] == 10
        assert after["loaded"] == before["digests"][10]
        assert after["losses"] == before["losses"][10:]
        assert after["digest"] == before["digests"][LAST]
    assert find_latest_valid(str(root)) == str(root / "step_10")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_step_that_is_saved_in_the_background_keeps_the_values_of_the_call(tmp_path: pathlib.Path) -> None:
    weights = torch.arange(10_000, dtype=torch.float32)
    future = dcp.async_save({"w": weights}, storage_writer=UCVolumeWriter(tmp_path / "step_1"))
    weights.fill_(-1.0)
    future.result()
    found = {"w": torch.zeros(10_000)}
    dcp.load(found, storage_reader=UCVolumeReader(tmp_path / "step_1"))
    assert torch.equal(found["w"], torch.arange(10_000, dtype=torch.float32))


@pytest.mark.usefixtures("alone")
def test_a_committed_folder_is_never_written_again(tmp_path: pathlib.Path) -> None:
    dcp.save({"w": torch.ones(3)}, storage_writer=UCVolumeWriter(tmp_path / "step_1"))
    with pytest.raises(BaseException, match="already holds a committed checkpoint") as told:
        dcp.save({"w": torch.zeros(3)}, storage_writer=UCVolumeWriter(tmp_path / "step_1"))
    assert "Save into a folder of its own" in str(told.value)
    found = {"w": torch.zeros(3)}
    dcp.load(found, storage_reader=UCVolumeReader(tmp_path / "step_1"))
    assert found["w"].tolist() == [1, 1, 1]


@pytest.mark.usefixtures("alone")
def test_a_flipped_bit_is_found_before_the_live_tensor_is_touched(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "step_1"
    dcp.save({"w": torch.ones(1000)}, storage_writer=UCVolumeWriter(folder))
    shard = next(folder.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    live = {"w": torch.full((1000,), 7.0)}
    with pytest.raises(BaseException, match=shard.name) as told:
        dcp.load(live, storage_reader=UCVolumeReader(folder))
    causes = [told.value, *getattr(told.value, "failures", {}).values()]
    assert any(isinstance(cause, CheckpointCorruptError) or "CheckpointCorrupt" in repr(cause) for cause in causes)
    assert live["w"].eq(7).all()


@pytest.mark.usefixtures("alone")
def test_a_folder_that_holds_nothing_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(BaseException, match="step_404") as told:
        dcp.load({"w": torch.ones(1)}, storage_reader=UCVolumeReader(tmp_path / "step_404"))
    causes = [told.value, *getattr(told.value, "failures", {}).values()]
    assert any(isinstance(cause, CheckpointError) or "Checkpoint" in repr(cause) for cause in causes)
