"""What copies in a neighbour's memory cost, and what a restore from them takes, as ratios.

Two simulated nodes on this machine, a helper process and a rank each, which train on two cores. Interleaved over rounds
(the first warms up), with `peer_memory` off and on:

    blocked    that the training thread is held up by one save, also before the next optimizer step; largest over ranks
    overhead   blocked, plus the slow-down of the steps after it, until the neighbours have their copies; as many steps
               are looked at with them off
    cpu_s_gb   CPU seconds of both helpers a GB of state, for a save without training beside it, copies included
    copied_s   from handing over until the neighbour has a rank's share, training beside it

    restore    until the state is back in the live tensors of both ranks: from the volume (files in the page cache, both
               helpers fresh), and from the neighbour of a lost node, whose new helper fetches what it needs

`m` is a copy of the whole state into warm memory on both ranks at once: the yardstick.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from sgpu.checkpoint import Checkpointer, CheckpointPolicy
from sgpu.contract import records

Row = dict[str, Any]
REPOSITORY = pathlib.Path(__file__).parents[2]
WORLD = 2
STEPS_BEFORE, STEPS_AFTER = 5, 10
MODES = {"off": False, "on": True}


class Rank:
    """One trainer. Does what it is told to, a JSON line each, and answers with one."""

    def __init__(self, megabytes: int, folder: str, rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=WORLD)
        width = 2048 if megabytes >= 300 else 1024 if megabytes >= 40 else 256
        torch.manual_seed(0)
        layers = [nn.Linear(width, width) for _ in range(max(2, round(megabytes * 1e6 / 12 / width**2)))]
        self.model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.x = torch.randn(16, width)
        self.folder = folder
        self.ways: dict[str, Checkpointer] = {}
        self.step()

    def tensors(self) -> list[torch.Tensor]:
        states = self.optimizer.state.values()
        return [*self.model.parameters(), *(value for state in states for value in state.values())]

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()

    def open(self, helper: str, mode: str, generation: int) -> None:
        os.environ["SGPU_CHECKPOINT_HELPER"] = helper
        policy = CheckpointPolicy(f"{self.folder}/{mode}", peer_memory=MODES[mode], keep_last=2)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.ways[mode] = Checkpointer(policy, state, generation=generation, staging="background")

    def close(self, mode: str) -> None:
        self.ways.pop(mode).close()

    def copy(self) -> float:
        tensors = self.tensors()
        warm = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
        seconds = []
        for _ in range(3):
            dist.barrier()
            start = time.perf_counter()
            with torch.no_grad():
                for target, tensor in zip(warm, tensors, strict=True):
                    target.copy_(tensor)
            seconds.append(_largest(time.perf_counter() - start))
        return statistics.median(seconds)

    def train(self, mode: str, at: int) -> Row:
        way, before = self.ways[mode], []
        for _ in range(STEPS_BEFORE):
            start = time.perf_counter()
            self.step()
            before.append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        way.save(at)
        for _ in range(STEPS_AFTER):
            self.step()
        window = time.perf_counter() - start
        way.wait()
        (report,) = way.poll()
        overhead = window - STEPS_AFTER * _largest(statistics.median(before))
        return {"blocked": _largest(report.blocked_seconds), "overhead": _largest(overhead)}

    def save(self, mode: str, at: int) -> None:
        dist.barrier()
        self.ways[mode].save(at)
        self.ways[mode].wait()
        self.ways[mode].poll()

    def restore(self, mode: str) -> Row:
        dist.barrier()
        start = time.perf_counter()
        restored = self.ways[mode].restore()
        seconds = _largest(time.perf_counter() - start)
        assert restored is not None
        return {"seconds": seconds, "source": restored.source}

    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())


def _largest(value: float) -> float:
    told = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return float(told)


class Cluster:
    """Two nodes: their helpers and ranks."""

    def __init__(self, megabytes: int, folder: str) -> None:
        self.folder = folder
        self.helpers: dict[int, tuple[subprocess.Popen[bytes], str]] = {}
        self._numbers = itertools.count()
        for node in range(WORLD):
            self.start(node)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.bench_checkpoint_peer", str(megabytes), folder, str(rank)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=REPOSITORY,
            ) for rank in range(WORLD)
        ]  # fmt: skip

    def start(self, node: int) -> None:
        """A (new) helper for the node; what the former one held is lost with it."""
        if node in self.helpers:
            self.helpers[node][0].kill()
            self.helpers[node][0].communicate()
        name = f"sgpu-bench-{os.getpid()}-{next(self._numbers)}"
        process = subprocess.Popen(
            [sys.executable, "-m", "sgpu.checkpoint.helper", "--name", name, "--first-rank", str(node), "--ranks", "1",
             "--node", str(node), "--nodes", str(WORLD), "--address", f"127.0.0.{node + 2}",
             "--peers", f"{self.folder}/peers"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY,
            env={**os.environ, "SGPU_RUN_DIR": self.folder},
        )  # fmt: skip
        assert process.stdout is not None  # it is a pipe
        process.stdout.readline()
        self.helpers[node] = process, name

    def tell(self, what: str, *arguments: Any) -> Any:
        """Rank 0's answer, once both have answered."""
        for rank, process in enumerate(self.ranks):
            assert process.stdin is not None
            own = [self.helpers[rank][1], *arguments] if what == "open" else arguments
            process.stdin.write(json.dumps([what, *own]) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self.ranks if process.stdout is not None]
        return json.loads(answers[0])

    def copied(self, step: int) -> list[float]:
        """Waits until both neighbours have their copies; how long these took."""
        path = pathlib.Path(self.folder) / "events.jsonl"
        while True:
            events = records.read_all(path) if path.exists() else []
            lost = [event for event in events if event["kind"] == "checkpoint_not_copied"]
            assert not lost, lost
            found = [e["seconds"] for e in events if e["kind"] == "checkpoint_copied" and e["step"] == step]
            if len(found) == WORLD:
                return found
            time.sleep(0.02)

    def cpu_seconds(self) -> float:
        return sum(sum(psutil.Process(process.pid).cpu_times()[:2]) for process, _ in self.helpers.values())

    def close(self) -> None:
        for process in [*self.ranks, *(process for process, _ in self.helpers.values())]:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def _cluster(megabytes: int) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="sgpu-bench-") as folder:
        found = Cluster(megabytes, folder)
        try:
            yield found
        finally:
            found.close()


def _costs(cluster: Cluster, rounds: int, steps: Iterator[int]) -> list[Row]:
    rows: dict[str, list[Row]] = {mode: [] for mode in MODES}
    size = cluster.tell("size")
    for mode in MODES:
        cluster.tell("open", mode, 0)
    for number in range(rounds + 1):
        m = cluster.tell("copy")
        for mode in MODES:
            step = next(steps)
            row = cluster.tell("train", mode, step)
            row["copied_s"] = max(cluster.copied(step)) if MODES[mode] else None
            before, step = cluster.cpu_seconds(), next(steps)
            cluster.tell("save", mode, step)
            if MODES[mode]:
                cluster.copied(step)
            row["cpu_s_gb"] = (cluster.cpu_seconds() - before) / size * 1e9
            if number > 0:
                rows[mode].append({**row, "blocked/m": row["blocked"] / m, "overhead/m": row["overhead"] / m})
    for mode in MODES:
        cluster.tell("close", mode)
    return [
        {"what": f"save, peer_memory {mode}",
         **{name: statistics.median(row[name] for row in found) if found[0][name] is not None else None
            for name in ("blocked/m", "overhead/m", "cpu_s_gb", "copied_s")}}
        for mode, found in rows.items()
    ]  # fmt: skip


def _restores(cluster: Cluster, rounds: int, steps: Iterator[int]) -> list[Row]:
    found: dict[str, list[float]] = {"volume": [], "peer memory": []}
    for number in range(rounds + 1):
        generation, step = 2 * number + 1, next(steps)
        cluster.tell("open", "on", generation)
        cluster.tell("save", "on", step)
        cluster.copied(step)
        cluster.tell("close", "on")
        m = cluster.tell("copy")
        for source, lost in (("peer memory", [0]), ("volume", [0, 1])):
            for node in lost:
                cluster.start(node)
            cluster.tell("open", "on", generation + 1)
            told = cluster.tell("restore", "on")
            assert told["source"] == source, told
            if number > 0:
                found[source].append(told["seconds"] / m)
            cluster.tell("close", "on")
    return [
        {"what": f"restore from {source}", "restore/m": statistics.median(values)} for source, values in found.items()
    ]


def run(quick: bool) -> list[Row]:
    """Rows of costs and of restores, a state size each."""
    rows = []
    for megabytes, rounds in [(20, 2)] if quick else [(60, 7), (600, 5)]:
        with _cluster(megabytes) as cluster:
            steps = itertools.count(1)
            found = [*_costs(cluster, rounds, steps), *_restores(cluster, rounds, steps)]
            rows += [{"MB": megabytes, **row} for row in found]
    return rows


def _obey(megabytes: int, folder: str, number: int) -> None:
    rank = Rank(megabytes, folder, number)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        print(json.dumps(getattr(rank, what)(*arguments)), flush=True)


if __name__ == "__main__":
    _obey(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
