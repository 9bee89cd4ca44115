"""Four ranks on two nodes, so that local ranks repeat: each gets its own random streams and buffers back."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import random
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist

from sgpu import CheckpointPolicy, settings
from sgpu.testing.laws.fresh import FreshProcesses
from sgpu.testing.laws.worker import become_worker, make_run
from sgpu.training import TrainLoop, seed_everything

cloudpickle.register_pickle_by_value(sys.modules[__name__])
WORLD = 4


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1), np.random.randn()]


def train(folder: pathlib.Path, number: int, until: int | None, rank: int) -> None:
    torch.set_num_threads(1)
    become_worker(folder / f"run{number}", rank=rank, world_size=WORLD)
    settings.adopt({"LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2)})
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet{number}", rank=rank, world_size=WORLD)
    seed_everything(10 * number)  # all ranks alike: what makes them differ is how much they draw
    model = torch.nn.Linear(1, 1)
    model.register_buffer("own", torch.zeros(()))
    loop = TrainLoop(
        model=model, max_steps=3,
        checkpoints=CheckpointPolicy(str(folder / f"checkpoints{min(number, 1)}"), every_steps=1),
    )  # fmt: skip
    output = os.open(folder / f"ledger{number}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for step in loop:
        if step == until:
            loop._checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(rank + 1):
            found = draw()
        model.own.add_(rank + 1)  # type: ignore[operator, union-attr]
        os.write(output, json.dumps([step, found, model.own.item()]).encode() + b"\n")  # type: ignore[operator, union-attr]
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[FreshProcesses]]:
    started = [FreshProcesses() for _ in range(WORLD)]
    yield started
    for host in started:
        host.close()


def test_each_rank_repeats_its_own_draws_and_the_four_differ(
    hosts: list[FreshProcesses], tmp_path: pathlib.Path
) -> None:
    def live(number: int, until: int | None) -> list[list[Any]]:
        make_run(tmp_path / f"run{number}", world_size=WORLD)
        logs = [tmp_path / f"log{number}.{rank}" for rank in range(WORLD)]
        with ThreadPoolExecutor(WORLD) as pool:
            job = functools.partial(train, tmp_path, number, until)
            codes = list(pool.map(lambda rank: hosts[rank].run(functools.partial(job, rank), log=logs[rank]), range(4)))
        wanted = 0 if until is None else -signal.SIGKILL
        assert codes == [wanted] * WORLD, "\n".join(log.read_text()[-2000:] for log in logs)
        files = [tmp_path / f"ledger{number}.{rank}" for rank in range(WORLD)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    whole = live(0, None)
    seed_shift = live(1, 1)  # begins with another seed: its first step is its own
    rest = live(2, None)
    again = live(3, None)
    assert [len(records) for records in (*whole, *seed_shift, *rest, *again)] == [3] * 4 + [1] * 4 + [2] * 4 + [0] * 4
    assert len({str(records[-1][1]) for records in rest}) == WORLD
    assert [records[-1][2] for records in rest] == [3.0, 6.0, 9.0, 12.0]
    for rank in range(WORLD):
        random.seed(10)
        np.random.seed(10)
        torch.manual_seed(10)
        model = torch.nn.Linear(1, 1)
        del model
        wanted = []
        for _ in range(3):
            for _ in range(rank + 1):
                found = draw()
            wanted.append(found)
        assert [seed_shift[rank][0][1], *(record[1] for record in rest[rank])] == wanted, f"rank {rank}"
