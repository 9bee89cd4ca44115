"""The same small training job, bare for torchrun and in the harness for sgpu. Each step leaves a line with its time."""

from __future__ import annotations

import json
import os
import pathlib
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from tests.benchmarks import strikes


def note(folder: str, rank: int, step: int, life: str = "") -> None:
    line = json.dumps({"time": time.time(), "pid": os.getpid(), "rank": rank, "step": step, "life": life}) + "\n"
    with open(os.path.join(folder, f"rank{rank}.jsonl"), "a") as file:
        file.write(line)


def lines(folder: str) -> list[dict[str, Any]]:
    found = []
    for path in pathlib.Path(folder).glob("rank*.jsonl"):
        found += [json.loads(line) for line in path.read_text().splitlines()]
    return found


def plain_model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))


def model_and_optimizer() -> tuple[Any, Any]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(plain_model())
    return model, torch.optim.AdamW(model.parameters())


def train(steps: Iterable[int], model: Any, optimizer: Any, folder: str, rank: int, after: Any) -> None:
    """About 20 ms a step. `life` in each line tells one call of this function from the next."""
    import torch

    life = uuid.uuid4().hex
    for step in steps:
        loss = model(torch.randn(16, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        note(folder, rank, step, life)
        after(step, loss)
        strikes.meet(folder, rank, step)


def in_harness(folder: str, total: int, every: int) -> None:
    """What sgpu runs."""
    import sgpu

    sgpu.runtime.init()
    model, optimizer = model_and_optimizer()
    loop = sgpu.TrainLoop(model=model, optimizer=optimizer, max_steps=total, checkpoint_every=every)
    train(loop, model, optimizer, folder, sgpu.runtime.rank(), lambda _step, loss: loop.log(loss=loss))


def _monitored() -> Any:
    """NVRx' launcher wants to hear of each rank."""
    import nvidia_resiliency_ext.fault_tolerance as fault_tolerance

    client = fault_tolerance.RankMonitorClient()
    client.init_workload_monitoring()
    return client.send_heartbeat


def bare(folder: str, total: int, every: int, *, store: Any = None, alive: Callable[[], None] | None = None) -> None:
    """What torchrun and NVRx run: the same job, with torch.save of the newest state by rank 0.

    Args:
        store: where the ranks meet; None: by the environment.
        alive: to be called after each step.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    timeout = os.environ.get("BENCH_GROUP_SECONDS")
    place = {} if store is None else {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")}
    dist.init_process_group(
        "gloo", store=store, timeout=timedelta(seconds=float(timeout)) if timeout else None, **place
    )
    if os.environ.get("BENCH_NVRX"):
        alive = _monitored()
    rank = dist.get_rank()
    model, optimizer = model_and_optimizer()
    path = pathlib.Path(folder) / "checkpoint.pt"
    first = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]

    def after(step: int, _loss: Any) -> None:
        if alive is not None:
            alive()
        if rank == 0 and (step + 1) % every == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)

    train(range(first, total), model, optimizer, folder, rank, after)
    dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    bare(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
