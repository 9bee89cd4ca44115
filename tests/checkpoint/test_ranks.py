"""Several ranks: real processes, one gloo group."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from sgpu.checkpoint import Catalog

COMMON = """
import random
import numpy as np
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from sgpu.contract.errors import *

class Rng:
    def state_dict(self):
        return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "random": random.getstate()}
    def load_state_dict(self, state):
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["random"])

def draws():
    return torch.rand(()).item(), np.random.rand(), random.random()

def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 2))

def make(seed):
    model = DDP(network(seed)) if world > 1 else network(seed)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

def train(model, optimizer, steps, seed):
    for step in range(steps):
        torch.manual_seed(1000 * seed + 10 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()

def plain(model, optimizer):
    inner = model.module if hasattr(model, "module") else model
    state = optimizer.state_dict()["state"]
    return [t.clone() for t in inner.state_dict().values()] + [t.clone() for s in state.values() for t in s.values()]

def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(a, b))
"""

SAVE = (
    COMMON
    + """
import torch.distributed as dist
model, optimizer = make(0)
train(model, optimizer, 2, seed=1)
torch.manual_seed(rank); np.random.seed(rank); random.seed(rank)
for _ in range(rank + 1):
    draws()
with Checkpointer(CheckpointPolicy(ROOT), {"model": model, "optimizer": optimizer}, per_rank={"rng": Rng()}) as c:
    assert c.restore() is None
    c.save(7, metadata={"loss": 0.5})
    mine = [draws() for _ in range(3)]
    c.wait()
    (report,) = c.poll()
    assert report.error is None and report.size_bytes > 0
after = plain(model, optimizer)
if rank == 0:
    torch.save(after, ROOT + "/../whole.pt")
train(model, optimizer, 2, seed=2)
torch.save({"after": plain(model, optimizer)}, ROOT + f"/../later{rank}.pt")
print(mine)
dist.destroy_process_group()
"""
)

RESTORE = (
    COMMON
    + """
model, optimizer = make(50)
torch.manual_seed(77); np.random.seed(77); random.seed(77)
with Checkpointer(CheckpointPolicy(ROOT), {"model": model, "optimizer": optimizer}, per_rank={"rng": Rng()}) as c:
    restored = c.restore()
    assert (restored.step, restored.world_size, restored.metadata) == (7, 2, {"loss": 0.5}), restored
    assert restored.per_rank_restored is (world == 2)
    mine = [draws() for _ in range(3)]
    others = [c.restored_per_rank(r)["rng"]["random"] for r in (0, 1)]
    assert others[0] != others[1]
    try:
        c.restored_per_rank(2)
        raise SystemExit("rank 2 was not there")
    except CheckpointNotFoundError:
        pass
# Under DDP buffers are those of rank 0, which is what was saved.
assert equal(plain(model, optimizer), torch.load(ROOT + "/../whole.pt"))
if world == 2:
    train(model, optimizer, 2, seed=2)
    later = torch.load(ROOT + f"/../later{rank}.pt")["after"]
    assert equal(plain(model, optimizer), later)
print(mine)
if world > 1:
    dist.destroy_process_group()
"""
)


def test_each_rank_gets_its_own_back_and_training_goes_on_to_the_bit(
    run_ok: Callable[..., list[str]], tmp_path: pathlib.Path
) -> None:
    saved = run_ok(SAVE, 2)
    assert len(set(saved)) == 2
    told = Catalog(tmp_path / "root").inspect(7)
    assert told.world_size == 2
    sizes = [path.stat().st_size for path in pathlib.Path(told.path).glob("*.distcp")]
    assert max(sizes) < 0.7 * sum(sizes)  # each rank its share, not the replica
    assert not list(pathlib.Path(told.path).glob(".done*"))
    assert run_ok(RESTORE, 2) == saved
    run_ok(RESTORE, 1)


MANY = (
    COMMON
    + """
import torch.distributed as dist
box = {"w": torch.zeros(20_000)}
model = network(0)
with Checkpointer(CheckpointPolicy(ROOT, keep_last=3), {"box": box, "model": model}) as c:
    for step in range(20):
        box["w"].fill_(step)
        c.save(step)
        together = torch.ones(1000)
        dist.all_reduce(together)
        dist.barrier()
assert not [r for r in c.poll() if r.error]
dist.destroy_process_group()
"""
)


def test_saves_without_a_gap_while_the_loop_reduces(run_ok: Callable[..., list[str]], tmp_path: pathlib.Path) -> None:
    run_ok(MANY, 2, timeout_seconds=60)
    catalog = Catalog(tmp_path / "root")
    assert catalog.steps() == [17, 18, 19]
    assert all(catalog.verify(step, deep=True).ok for step in catalog.steps())


FAULTS = (
    COMMON
    + """
import torch.distributed as dist, time
from sgpu.contract import failpoint
state = {"box": {"w": torch.ones(1000)}, "model": network(0)}
c = Checkpointer(CheckpointPolicy(ROOT), state, per_rank={"rng": Rng()})

def arm(text):
    os.environ["SGPU_FAILPOINT"] = text
    failpoint.reset()

def fails(step, *words):
    start = time.monotonic()
    c.save(step)
    try:
        c.wait()
    except CheckpointSaveError as error:
        assert all(word in str(error) for word in words), (words, str(error))
        assert time.monotonic() - start < 60
        return error
    raise SystemExit(f"save {step} did not fail")

arm("checkpoint.shard_half@0=exit:17")
error = fails(1, "rank 0", "exit code 17")
assert error.rank == 0
arm("checkpoint.shard_written@1=errno:ENOSPC")
assert fails(1, "rank 1", "No space left").rank == 1
arm("checkpoint.manifest=errno:EIO")
fails(2, "rank 0", "Input/output error")
arm("")
c.save(2)
c.wait()
# What only one rank could keep is refused, by name.
state["box"]["mine"] = rank
assert "'box'" in str(fails(3, "rank 1", "per_rank"))
del state["box"]["mine"]
if rank == 1:
    state["box"]["v"] = torch.ones(3)
fails(3, "rank 1", "other tensors")
state["box"].pop("v", None)
# One rank cannot even stage.
if rank == 1:
    state["box"]["f"] = len
    try:
        c.save(4)
        raise SystemExit("staged a function")
    except CheckpointSaveError as error:
        assert "box.f" in str(error) or "f holds" in str(error), error
    del state["box"]["f"]
else:
    fails(4, "rank 1", "could not be staged")
c.save(4)
c.close()
assert Catalog(ROOT).steps() == [2, 4], Catalog(ROOT).steps()
if rank == 0:
    left = sorted(p for p in os.listdir(ROOT) if p.startswith("step"))
    print(left)
dist.destroy_process_group()
"""
)


def test_one_rank_that_fails_is_told_to_all_and_the_next_save_works(
    run_ok: Callable[..., list[str]], tmp_path: pathlib.Path
) -> None:
    log = tmp_path / "fired.log"
    out = run_ok(FAULTS, 2, SGPU_FAILPOINT_LOG=str(log))
    fired = [line.split()[:2] for line in log.read_text().splitlines()]
    assert fired[:3] == [
        ["checkpoint.shard_half", "rank=0"], ["checkpoint.shard_written", "rank=1"], ["checkpoint.manifest", "rank=0"]
    ]  # fmt: skip
    assert eval(out[0]) == ["step-00000002.a2", "step-00000004.a4"]  # failed attempts are cleared


FALLBACK = (
    COMMON
    + """
import torch.distributed as dist
box = {"w": torch.zeros(1000)}
rng = Rng()
c = Checkpointer(CheckpointPolicy(ROOT), {"box": box}, per_rank={"rng": rng})
for step in (1, 2, 3):
    box["w"].fill_(step)
    c.save(step)
c.wait()
if rank == 0:  # only rank 1 reads its own file
    path = pathlib.Path(Catalog(ROOT).path(3)) / "rank-1.pt"
    content = bytearray(path.read_bytes()); content[900] ^= 1; path.write_bytes(content)
    path = pathlib.Path(Catalog(ROOT).path(2)) / "manifest.json"
    content = bytearray(path.read_bytes()); content[50] ^= 1; path.write_bytes(content)
dist.barrier()
box["w"].zero_()
restored = c.restore()
assert restored.step == 1 and bool((box["w"] == 1).all()), restored
assert ["rank 1" in s.reason for s in restored.skipped] == [True, False], restored.skipped
assert "rank-1.pt" in restored.skipped[0].reason
# A mismatch on one rank alone is an error on all, and nothing is touched.
c.close()
live = {"w": torch.zeros(1000 + rank)}
with Checkpointer(CheckpointPolicy(ROOT), {"box": live}, per_rank={"rng": rng}) as c:
    try:
        c.restore()
        raise SystemExit("did not raise")
    except CheckpointMismatchError as error:
        assert error.different and "rank 1" in str(error), error
assert not live["w"].any()
dist.destroy_process_group()
"""
)


def test_all_ranks_fall_back_together(run_ok: Callable[..., list[str]]) -> None:
    run_ok(FALLBACK, 2)


SHARDED = (
    COMMON
    + """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint import FileSystemReader
import torch.distributed.checkpoint as dcp

def sharded(seed, mesh):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3), nn.Linear(3, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

def step(model, optimizer, seed):
    torch.manual_seed(seed + rank)
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()

def whole(model, optimizer):
    tensors = list(model.state_dict().values()) + [t for s in optimizer.state.values() for t in s.values()]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]

shape = (2, 2) if world == 4 else (world,)
names = ("replicate", "shard") if world == 4 else ("shard",)
mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
model, optimizer = sharded(0, mesh)
path = ROOT + "/../whole.pt"
if os.environ["DO"] == "save":
    step(model, optimizer, 1)
    with Checkpointer(CheckpointPolicy(ROOT), {"model": model, "optimizer": optimizer}) as c:
        c.save(5)
    found = whole(model, optimizer)
    if rank == 0:
        torch.save(found, path)
    assert Catalog(ROOT).verify(5, deep=True).ok
    assert max(t.shards for t in Catalog(ROOT).inspect(5).tensors) == 2
else:
    fresh, other = sharded(9, mesh)
    with Checkpointer(CheckpointPolicy(ROOT), {"model": fresh, "optimizer": other}) as c:
        restored = c.restore()
    assert restored.step == 5
    assert equal(whole(fresh, other), torch.load(path))
    step(fresh, other, 2)
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (4, 2)])
def test_sharded_models_also_onto_another_number_of_ranks(
    before: int, after: int, run_ok: Callable[..., list[str]]
) -> None:
    """FSDP2, with shards that are uneven or empty; four ranks are two replicas of two shards."""
    run_ok(SHARDED, before, DO="save")
    run_ok(SHARDED, after, DO="restore")


TORN = (
    COMMON
    + """
import torch.distributed as dist
box = {"w": torch.zeros(30_000), "v": torch.zeros(30_000)}
c = Checkpointer(CheckpointPolicy(ROOT), {"model": network(0), "box": box})
c.save(10)
c.wait()
box["w"].fill_(20); box["v"].fill_(20)
if rank == 1:
    from sgpu.contract import failpoint
    os.environ["SGPU_FAILPOINT"] = "checkpoint.staged=kill"
    failpoint.reset()
c.save(20)
if rank == 1:
    c.wait()
os._exit(5)  # as an agent ends the others
"""
)


def test_one_rank_killed_in_a_save_leaves_the_one_before(run_ranks: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    log = tmp_path / "fired.log"
    ended = run_ranks(TORN, 2, SGPU_FAILPOINT_LOG=str(log))
    assert [one.code for one in ended] == [5, -9]
    assert "checkpoint.staged rank=1" in log.read_text()
    assert Catalog(tmp_path / "root").steps() == [10]
    assert Catalog(tmp_path / "root").verify(10, deep=True).ok
