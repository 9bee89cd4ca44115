"""The rest of the state, through the loop and with real ranks: killed in the middle, all ends as it would have."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from sgpu import CheckpointPolicy
from sgpu.data import DataLoader
from sgpu.testing.laws.fresh import FreshProcesses
from sgpu.testing.laws.worker import become_worker, make_run
from sgpu.training import TrainLoop, seed_everything

cloudpickle.register_pickle_by_value(sys.modules[__name__])
WORLD = 2


def model_of(kind: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """What is trained, and what it wraps; the first layer is frozen."""
    inner = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 8),
        torch.nn.Linear(8, 1),
    )  # fmt: skip
    inner[0].requires_grad_(False)
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard

        inner[1] = torch.nn.LayerNorm(8)
        mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
        fully_shard(inner[3], mesh=mesh)
        fully_shard(inner, mesh=mesh)
        return inner, inner
    # each rank has statistics of its own batches
    return torch.nn.parallel.DistributedDataParallel(inner, broadcast_buffers=False), inner


class Average:
    """Of what this rank holds of the weights, with warm-up by a plain counter."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.updates, self.model = 0, model
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self) -> None:
        self.updates += 1
        for name, value in self.model.named_parameters():
            self.weights[name].lerp_(value.detach(), 1 / (self.updates + 1))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": dict(self.weights)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for name, value in state["weights"].items():
            self.weights[name].copy_(value)


def train(folder: pathlib.Path, kind: str, number: int, until: int | None, rank: int) -> None:
    torch.set_num_threads(1)
    become_worker(folder / f"run{number}", rank=rank, world_size=WORLD)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{number}", rank=rank, world_size=WORLD)
    seed_everything(50 if number < 2 else 99)  # the weights of the restored one do not matter
    model, inner = model_of(kind)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in inner.parameters() if p.requires_grad and p.dim() > 1], "lr": 0.05},
            {"params": [p for p in inner.parameters() if p.requires_grad and p.dim() == 1], "lr": 0.01},
        ]
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    average = Average(inner)
    seed_everything(7 * number + rank if number > 1 else 5 + rank)
    data = torch.utils.data.TensorDataset(torch.arange(96.0).reshape(24, 4) / 96)
    loop = TrainLoop(
        model=model, optimizer=optimizer, loader=DataLoader(data, 2, shuffle=True, seed=3, num_workers=0), epochs=2,
        extra={"scaler": scaler, "average": average}, accumulate=2,
        checkpoints=CheckpointPolicy(str(folder / f"checkpoints{min(number, 1)}"), every_steps=1, keep_last=3),
    )  # fmt: skip
    output = os.open(folder / f"ledger{number}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for (features,) in loop:
        if loop.step == until:
            loop._checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(features).square().mean()
        scaler.scale(loss).backward()
        os.write(output, json.dumps([loop.step, loop.epoch, loss.item(), scaler.get_scale()]).encode() + b"\n")
        if loop.is_update_step:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            average.update()
    os.write(output, json.dumps(digest(inner, optimizer, average)).encode() + b"\n")
    dist.destroy_process_group()


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer, average: Average) -> str:
    """Of what this rank holds: weights, its own buffers, the optimizer's state, the average."""
    found = hashlib.sha256(str(average.updates).encode())
    values = [*model.state_dict().values(), *average.weights.values()]
    values += [value for state in optimizer.state.values() for _, value in sorted(state.items())]
    for value in values:
        local: Any = value.to_local() if hasattr(value, "to_local") else value
        found.update(local.detach().numpy().tobytes())
    return found.hexdigest()


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[FreshProcesses]]:
    started = [FreshProcesses() for _ in range(WORLD)]
    yield started
    for host in started:
        host.close()


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_frozen_grouped_scaled_averaged_and_accumulated_state_goes_on_to_the_bit(
    kind: str, hosts: list[FreshProcesses], tmp_path: pathlib.Path
) -> None:
    def live(number: int, until: int | None) -> list[list[Any]]:
        make_run(tmp_path / f"run{number}", world_size=WORLD)
        logs = [tmp_path / f"log{number}.{rank}" for rank in range(WORLD)]
        with ThreadPoolExecutor(WORLD) as pool:
            codes = list(pool.map(
                lambda rank: hosts[rank].run(
                    functools.partial(train, tmp_path, kind, number, until, rank), log=logs[rank]
                ),
                range(WORLD),
            ))  # fmt: skip
        wanted = 0 if until is None else -signal.SIGKILL
        assert codes == [wanted] * WORLD, "\n".join(log.read_text()[-3000:] for log in logs)
        files = [tmp_path / f"ledger{number}.{rank}" for rank in range(WORLD)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    whole, first, rest = live(0, None), live(1, 4), live(2, None)
    for rank in range(WORLD):
        assert len(whole[rank]) == 13
        assert first[rank] == whole[rank][:8]
        assert rest[rank] == whole[rank][8:], "losses, scales and what is held at the end"
    assert len({record[3] for record in whole[0][:-1]}) > 2, "the scaler has moved"
    if kind == "replicated":
        assert whole[0][-1] != whole[1][-1], "each rank has buffers of its own"
