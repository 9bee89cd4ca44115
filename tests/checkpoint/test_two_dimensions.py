"""A model that is sharded twice, by FSDP and by tensor parallelism: each element once, and back in any world."""

from __future__ import annotations

from collections.abc import Callable

MODEL = """
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from sgpu.checkpoint.stores.posix import PosixStore

torch.manual_seed(0)
inner = nn.Sequential(nn.Linear(6, 10, bias=False), nn.ReLU(), nn.Linear(10, 6, bias=False), nn.LayerNorm(6))
whole = {name: value.clone() for name, value in inner.state_dict().items()}


def shard(mesh):
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return fully_shard(parallelize_module(inner, mesh["tensors"], plan), mesh=mesh["data"])
"""


def test_sharded_by_rows_and_again_by_rows_or_columns(run_ok: Callable[..., list[str]]) -> None:
    run_ok(
        MODEL
        + """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensors"))
model = shard(mesh)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 6)).sum().backward()
optimizer.step()
print([str(p.placements) for p in model.parameters()])
with Checkpointer(CheckpointPolicy(ROOT), {"model": model, "optimizer": optimizer}) as checkpointer:
    checkpointer.save(1)
    checkpointer.wait()
    kept = {name: value.full_tensor() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert checkpointer.restore().step == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), kept[name]), name
if rank == 0:
    torch.save(kept, ROOT + ".pt")
    told = Catalog(ROOT).inspect(1)
    shards = {tensor.name: tensor.shards for tensor in told.tensors}
    assert shards["model.0.weight"] == shards["model.2.weight"] == 4, shards
    assert shards["model.3.weight"] == 2, shards
dist.destroy_process_group()
""",
        4,
    )
    run_ok(
        MODEL
        + """
kept = torch.load(ROOT + ".pt")
optimizer = torch.optim.AdamW(inner.parameters())
state = {"model": inner, "optimizer": optimizer}
with Checkpointer(CheckpointPolicy(), state, store=PosixStore(pathlib.Path(ROOT))) as checkpointer:
    assert checkpointer.restore().step == 1
for name, value in inner.state_dict().items():
    assert torch.equal(value, kept[name]), name
assert not torch.equal(kept["0.weight"], whole["0.weight"])
""",
        1,
    )


def test_what_only_looks_like_a_copy_is_refused_not_lost(run_ok: Callable[..., list[str]]) -> None:
    """Each rank of the other dimension holds values of its own under one name: one of both would be lost."""
    run_ok(
        MODEL
        + """
from sgpu.contract.errors import CheckpointSaveError
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensors"))
model = shard(mesh)
checkpointer = Checkpointer(CheckpointPolicy(ROOT), {"model": model})
with torch.no_grad():
    model[3].weight.add_(mesh["tensors"].get_local_rank())
checkpointer.save(1)
try:
    checkpointer.wait()
    raise SystemExit("it was saved")
except CheckpointSaveError as error:
    assert "rank 1 holds a part of model.3.weight" in str(error), error
    assert error.unrecoverable
with torch.no_grad():
    model[3].weight.sub_(mesh["tensors"].get_local_rank())
checkpointer.save(2)
checkpointer.close()
assert Catalog(ROOT).steps() == [2]
dist.destroy_process_group()
""",
        4,
    )
