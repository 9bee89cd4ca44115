"""What a checkpoint costs the training, every way to save one side by side in one run, as ratios.

Gloo ranks hold the same model and Adam state. For each way, interleaved over rounds (the first warms up):

    blocked    that the training thread is held up by one save, also before the next optimizer step; largest over ranks
    overhead   blocked, plus the slow-down of the steps that run until the save is durable
    durable_s  seconds from the call until it is durable
    restore    until all of the state is back in the live tensors, its files in the page cache
    cpu_s_gb   CPU seconds of all ranks and their children a GB, for a save with no training beside it
    memory     largest growth of a rank's resident memory in its first save, as a share of the state

`m` is a copy of the whole state into warm memory on all ranks at once, `preadv` a plain read of as many bytes into warm
memory: the yardsticks. "saturated" is two ranks that train on two cores; "spare core" is one rank and an idle core.
`sgpu, from memory` is a restore from what the node's helper process still holds.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from tests.benchmarks.checkpoint_ways import WAYS, Sgpu, Way, tensors_of

Row = dict[str, Any]

REPOSITORY = pathlib.Path(__file__).parents[2]
STEPS_BEFORE = 5
LEAST_STEPS = 4


class Trainer:
    """A real loop: forward, backward, all-reduce, Adam."""

    def __init__(self, megabytes: int, rank: int) -> None:
        width = 2048 if megabytes >= 300 else 1024 if megabytes >= 40 else 256
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
        return {
            "model": self.net.state_dict(),
            "optim": self.optimizer.state_dict(),
            f"rng.rank{self.rank}": torch.get_rng_state(),
        }


def _largest(value: float) -> float:
    told = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


def _together(action: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    action()
    return _largest(time.perf_counter() - start)


def _measure(way: Way, trainer: Trainer, step: int, base_seconds: float) -> Row:
    state = trainer.state()
    dist.barrier()
    start = time.perf_counter()
    way.save(state, step)
    blocked = time.perf_counter() - start

    def before() -> None:
        nonlocal blocked
        at = time.perf_counter()
        way.before_step()
        blocked += time.perf_counter() - at

    steps, durable = 0, None
    while durable is None or steps < LEAST_STEPS:
        trainer.step(before)
        steps += 1
        if durable is None and _largest(0.0 if way.done() else 1.0) == 0.0:
            durable = time.perf_counter() - start
    window = time.perf_counter() - start
    way.wait()
    overhead = window - steps * base_seconds
    return {"blocked": _largest(blocked), "overhead": _largest(overhead), "durable": _largest(durable)}


def _timed_steps(trainer: Trainer) -> float:
    found = []
    for _ in range(STEPS_BEFORE):
        start = time.perf_counter()
        trainer.step()
        _largest(0.0)  # as the steps of a save are followed by
        found.append(time.perf_counter() - start)
    return _largest(statistics.median(found))


def _copy_seconds(trainer: Trainer) -> float:
    tensors = tensors_of(trainer.state())
    warm = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]

    def copy() -> None:
        for target, tensor in zip(warm, tensors, strict=True):
            target.copy_(tensor)

    return statistics.median(_together(copy) for _ in range(3))


def _read_seconds(trainer: Trainer, root: str) -> float:
    size = sum(tensor.nbytes for tensor in tensors_of(trainer.state()))
    path = pathlib.Path(root) / f"plain-{trainer.rank}"
    path.write_bytes(os.urandom(2**20) * (size // 2**20))
    warm = memoryview(bytearray(path.stat().st_size))
    with open(path, "rb", buffering=0) as file:

        def read() -> None:
            at = 0
            while at < len(warm):
                at += os.preadv(file.fileno(), [warm[at:]], at)

        seconds = statistics.median(_together(read) for _ in range(3))
    path.unlink()
    return seconds


def _cpu_seconds(way: Way, trainer: Trainer, step: int) -> float:
    """Of one save, of all ranks and their children, without a step beside it."""

    def spent() -> float:
        me = psutil.Process()
        alive = [me, *me.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in alive) + sum(me.cpu_times()[2:4])

    state = trainer.state()
    dist.barrier()
    before = spent()
    way.save(state, step)
    way.wait()
    told = torch.tensor([spent() - before], dtype=torch.float64)
    dist.all_reduce(told)
    return float(told)


def _resident(what: str) -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what}")


def _forget_peak() -> int:
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _rank(megabytes: int, rounds: int, root: str, rank: int, world: int) -> list[Row]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=world)
    group = dist.new_group(backend="gloo")
    trainer = Trainer(megabytes, rank)
    trainer.step()
    size = sum(tensor.nbytes for tensor in tensors_of(trainer.state()))
    ways = [way(root, rank, group) for way in WAYS]
    rows: dict[str, list[Row]] = {way.name: [] for way in ways}
    once: dict[str, Row] = {way.name: {} for way in ways}
    for number in range(rounds + 1):  # the first warms up
        copy = _copy_seconds(trainer)
        for way in ways:
            base_seconds, resident = _timed_steps(trainer), _forget_peak()
            row = _measure(way, trainer, number + 1, base_seconds)
            if number == 0:
                once[way.name]["memory"] = _largest((_resident("VmHWM") - resident) / size)
            else:
                rows[way.name].append({**row, "copy": copy})
    for way in ways:
        once[way.name]["cpu_s_gb"] = _cpu_seconds(way, trainer, rounds + 2) / size * 1e9
        state = trainer.state()
        read = _read_seconds(trainer, root)
        found = [_together(lambda way=way, state=state: way.load(state, rounds + 2)) for _ in range(4)]  # type: ignore[misc]
        once[way.name]["restore"] = statistics.median(found[1:])
        once[way.name]["read"] = read
    extra = _from_memory(ways[-1], trainer, rounds + 3, copy)
    for way in ways:
        way.close()
    dist.barrier()
    dist.destroy_process_group()
    return [_summary(name, found, once[name]) for name, found in rows.items()] + [extra]


def _from_memory(way: Way, trainer: Trainer, step: int, copy: float) -> Row:
    assert isinstance(way, Sgpu)
    state, found = trainer.state(), []
    for at in range(4):
        way.save(state, step + at)
        way.wait()
        way.checkpointer.close()
        dist.barrier()
        way.reopen()
        found.append(_together(lambda at=at: way.load(state, step + at)))  # type: ignore[misc]
        assert way.source == "memory", way.source
    return {"way": "sgpu, from memory", "restore/m": statistics.median(found[1:]) / copy}


def _summary(name: str, rows: list[Row], once: Row) -> Row:
    def median(of: Callable[[Row], float]) -> float:
        return statistics.median(map(of, rows))

    return {
        "way": name,
        "blocked_ms": 1000 * median(lambda row: row["blocked"]),
        "blocked/m": median(lambda row: row["blocked"] / row["copy"]),
        "overhead/m": median(lambda row: row["overhead"] / row["copy"]),
        "durable_s": median(lambda row: row["durable"]),
        "restore/m": once["restore"] / median(lambda row: row["copy"]),
        "restore/preadv": once["restore"] / once["read"],
        "cpu_s_gb": once["cpu_s_gb"],
        "memory": once["memory"],
    }


@contextlib.contextmanager
def _helper(world: int, root: str) -> Iterator[dict[str, str]]:
    """The process that an agent keeps for its node's ranks."""
    name = f"sgpu-bench-{os.getpid()}"
    command = [sys.executable, "-m", "sgpu.checkpoint.helper", "--name", name, "--ranks", str(world), "--peers", root]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        assert process.stdout is not None  # it is a pipe
        process.stdout.readline()
        yield {"SGPU_CHECKPOINT_HELPER": name}
        process.kill()  # its trainers are gone; nothing is left to be finished


def _table(megabytes: int, rounds: int, world: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="sgpu-bench-") as root, _helper(world, root) as helper:
        environment = {**os.environ, **helper, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        command = [sys.executable, "-m", "tests.benchmarks.bench_checkpoint", str(megabytes), str(rounds), root]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), str(world)],
                stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY,
            )
            for rank in range(world)
        ]  # fmt: skip
        outs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError(f"a rank failed: {[process.returncode for process in ranks]}")
    kind = "saturated" if world > 1 else "spare core"
    return [{"MB": megabytes, "trainer": kind, **row} for row in json.loads(outs[0].splitlines()[-1])]


def run(quick: bool) -> list[Row]:
    """One row a way of saving, state size and trainer."""
    kinds = [(20, 2, 2)] if quick else [(60, 7, 2), (600, 5, 2), (600, 5, 1)]
    return [row for megabytes, rounds, world in kinds for row in _table(megabytes, rounds, world)]


if __name__ == "__main__":
    size_text, rounds_text, where, rank_text, world_text = sys.argv[1:]
    print(json.dumps(_rank(int(size_text), int(rounds_text), where, int(rank_text), int(world_text))))
