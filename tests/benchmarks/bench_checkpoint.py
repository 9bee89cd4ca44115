"""What a checkpoint costs the training: torch.save, dcp.save, dcp.async_save and sgpu, in one run, as ratios.

    python tests/benchmarks/bench_checkpoint.py [--full]

Two gloo ranks hold the same model and Adam state. For each way of saving, interleaved over rounds:

    blocked     seconds that the training thread is held up by one save (largest over ranks)
    overhead    blocked, plus the slow-down of the steps that run until the save is durable
    durable     seconds from the call until it is durable
    restore     seconds until all of the state is back (warm page cache)

`m` is a copy of the whole state into warm memory, on both ranks at once, in the same run: the yardstick.
`make` is also a plug-in for other rigs: `make(rank, world, root, control_group, ckpt_group)`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

Row = dict[str, Any]


class Sgpu:
    """sgpu's engine behind the plug-in's methods."""

    name = "sgpu"
    staging = "background"

    def __init__(self, root: str, rank: int, world: int) -> None:
        from sgpu.checkpoint import Checkpointer, CheckpointPolicy

        self._rng_name = f"rng.rank{rank}"
        self._box: dict[str, Any] = {}
        self._rng = _Value()
        make_one = functools.partial(
            Checkpointer, CheckpointPolicy(keep_last=2), {"state": self._box}, per_rank={"rng": self._rng},
            root=f"{root}/{self.name}", rank=rank, world_size=world, replicated={"state"}, staging=self.staging,
        )  # fmt: skip
        self._checkpointer = make_one()
        self._reports: list[Any] = []
        self._saved = 0

    def save(self, state: dict[str, Any], step: int) -> None:
        self._take(state)
        self._checkpointer.save(step)
        self._saved += 1

    def _take(self, state: dict[str, Any]) -> None:
        self._box.clear()
        self._box.update({key: value for key, value in state.items() if key != self._rng_name})
        self._rng.value = state.get(self._rng_name)

    def pre_opt(self) -> None:
        self._checkpointer.before_optimizer_step()

    def done(self) -> bool:
        self._reports += self._checkpointer.poll()
        return len(self._reports) == self._saved

    def wait(self) -> None:
        self._checkpointer.wait()
        self.done()

    def load(self, state: dict[str, Any], step: int) -> None:
        self._take(state)
        restored = self._checkpointer.restore()
        assert restored is not None
        assert restored.step == step

    def close(self) -> None:
        self._checkpointer.close()


class SgpuForeground(Sgpu):
    name = "sgpu foreground"
    staging = "foreground"


class _Value:
    def __init__(self) -> None:
        self.value: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def make(rank: int, world: int, root: str, control_group: Any, ckpt_group: Any) -> Sgpu:
    return Sgpu(root, rank, world)


class TorchSave:
    """Rank 0 writes everything, and everybody waits: what scripts do."""

    name = "torch.save"

    def __init__(self, root: str, rank: int) -> None:
        self._root, self._rank = pathlib.Path(root) / self.name, rank

    def save(self, state: dict[str, Any], step: int) -> None:
        import torch
        import torch.distributed as dist

        if self._rank == 0:
            self._root.mkdir(parents=True, exist_ok=True)
            with open(self._root / "new", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._root / "new", self._root / f"{step}.pt")
        dist.barrier()

    def done(self) -> bool:
        return True

    def pre_opt(self) -> None:
        return

    def wait(self) -> None:
        return

    def load(self, state: dict[str, Any], step: int) -> None:
        import torch

        loaded = torch.load(self._root / f"{step}.pt", weights_only=True, map_location="cpu")
        for live, saved in zip(tensors_of(state), tensors_of(loaded), strict=True):
            live.copy_(saved)

    def close(self) -> None:
        return


class Dcp(TorchSave):
    name = "dcp.save"
    background = False

    def __init__(self, root: str, rank: int, group: Any) -> None:
        super().__init__(root, rank)
        self._group = group
        self._future: Any = None

    def save(self, state: dict[str, Any], step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import FileSystemWriter

        writer = FileSystemWriter(self._root / str(step))
        if self.background:
            self._future = dcp.async_save(state, storage_writer=writer, process_group=self._group)
        else:
            dcp.save(state, storage_writer=writer, process_group=self._group)

    def done(self) -> bool:
        return self._future is None or bool(self._future.done())

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()

    def load(self, state: dict[str, Any], step: int) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import FileSystemReader

        dcp.load(state, storage_reader=FileSystemReader(self._root / str(step)), process_group=self._group)


class DcpAsync(Dcp):
    name = "dcp.async_save"
    background = True


def tensors_of(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


class Trainer:
    """A real loop: forward, backward, all-reduce, Adam."""

    def __init__(self, megabytes: int, rank: int) -> None:
        import torch
        from torch import nn

        width = 1024 if megabytes >= 40 else 256
        layers = max(2, round(megabytes * 1e6 / 12 / width**2))
        torch.manual_seed(0)
        self.net = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
        self.model = nn.parallel.DistributedDataParallel(self.net)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(16, width)
        self.rank = rank

    def step(self, before: Callable[[], None] = lambda: None) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        before()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        import torch

        return {
            "model": self.net.state_dict(),
            "optim": self.optimizer.state_dict(),
            f"rng.rank{self.rank}": torch.get_rng_state(),
        }


def _largest(value: float) -> float:
    import torch
    import torch.distributed as dist

    told = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def _measure(way: Any, trainer: Trainer, step: int, base_seconds: float, least_steps: int) -> Row:
    import torch.distributed as dist

    state = trainer.state()
    dist.barrier()
    start = time.perf_counter()
    way.save(state, step)
    blocked = time.perf_counter() - start

    def before() -> None:
        nonlocal blocked
        at = time.perf_counter()
        way.pre_opt()
        blocked += time.perf_counter() - at

    steps, durable = 0, None
    while durable is None or steps < least_steps:
        trainer.step(before)
        steps += 1
        if durable is None and _largest(0.0 if way.done() else 1.0) == 0.0:
            durable = time.perf_counter() - start
    window = time.perf_counter() - start
    way.wait()
    return {
        "blocked": _largest(blocked),
        "overhead": _largest(window - steps * base_seconds),
        "durable": _largest(durable),
    }


def _timed_steps(trainer: Trainer, count: int) -> float:
    found = []
    for _ in range(count):
        start = time.perf_counter()
        trainer.step()
        _largest(0.0)
        found.append(time.perf_counter() - start)
    return _largest(statistics.median(found))


def _copy_seconds(trainer: Trainer) -> float:
    import torch
    import torch.distributed as dist

    tensors = tensors_of(trainer.state())
    warm = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
    found = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        for target, tensor in zip(warm, tensors, strict=True):
            target.copy_(tensor)
        found.append(time.perf_counter() - start)
    return _largest(statistics.median(found))


def _worker(megabytes: int, rounds: int, root: str, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=world)
    group = dist.new_group(backend="gloo")
    trainer = Trainer(megabytes, rank)
    ways = [
        TorchSave(root, rank),
        Dcp(root, rank, group),
        DcpAsync(root, rank, group),
        SgpuForeground(root, rank, world),
        Sgpu(root, rank, world),
    ]
    rows: dict[str, list[Row]] = {way.name: [] for way in ways}
    restores: dict[str, float] = {}
    for number in range(rounds + 1):  # the first warms up
        copy_seconds = _copy_seconds(trainer)
        for way in ways:
            base_seconds = _timed_steps(trainer, 5)
            row = _measure(way, trainer, number + 1, base_seconds, 4)
            if number:
                rows[way.name].append({**row, "copy": copy_seconds})
            if number == rounds:
                state = trainer.state()
                dist.barrier()
                start = time.perf_counter()
                way.load(state, number + 1)
                restores[way.name] = _largest(time.perf_counter() - start)
    for way in ways:
        way.close()
    if rank == 0:
        print(json.dumps([_summary(name, found, restores[name], megabytes) for name, found in rows.items()]))
    dist.barrier()
    dist.destroy_process_group()


def _summary(name: str, rows: list[Row], restore: float, megabytes: int) -> Row:
    def median(of: Callable[[Row], float]) -> float:
        return statistics.median(map(of, rows))

    return {
        "way": name,
        "state_megabytes": megabytes,
        "blocked_seconds": median(lambda row: row["blocked"]),
        "blocked_per_copy": median(lambda row: row["blocked"] / row["copy"]),
        "overhead_per_copy": median(lambda row: row["overhead"] / row["copy"]),
        "durable_seconds": median(lambda row: row["durable"]),
        "restore_per_copy": restore / median(lambda row: row["copy"]),
    }


def run(quick: bool) -> list[Row]:
    """One row a way of saving. Ratios are to a copy of the state into warm memory."""
    megabytes, rounds, world = (20, 2, 2) if quick else (60, 5, 2)
    with tempfile.TemporaryDirectory(prefix="sgpu-bench-") as root:
        command = [sys.executable, __file__, "--worker", str(megabytes), str(rounds), root]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        ranks = [
            subprocess.Popen([*command, str(rank), str(world)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(world)
        ]
        outs = [process.communicate()[0] for process in ranks]
        shutil.rmtree(f"{root}/sgpu", ignore_errors=True)
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"a rank failed: {[process.returncode for process in ranks]}")
    rows: list[Row] = json.loads(outs[0].splitlines()[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--worker", nargs=5)
    arguments = parser.parse_args()
    if arguments.worker:
        megabytes, rounds, root, rank, world = arguments.worker
        _worker(int(megabytes), int(rounds), root, int(rank), int(world))
        return
    rows = run(quick=not arguments.full)
    print(f"{rows[0]['state_megabytes']} MB of state, 2 ranks, {os.cpu_count()} cores; m = one copy of the state\n")
    print(f"{'way':16}{'blocked s':>11}{'blocked/m':>11}{'overhead/m':>12}{'durable s':>11}{'restore/m':>11}")
    for row in rows:
        print(
            f"{row['way']:16}{row['blocked_seconds']:11.4f}{row['blocked_per_copy']:11.2f}{row['overhead_per_copy']:12.2f}"
            f"{row['durable_seconds']:11.3f}{row['restore_per_copy']:11.2f}"
        )


if __name__ == "__main__":
    main()
