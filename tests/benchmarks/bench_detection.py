"""Detection: how late after its limit each kind of hang is told; when a slow rank is named, and whether equal ones are.

Goals: a hang within 0.5 s of its limit; no straggler among equal ranks; a slow one within five windows of 20 steps.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import tempfile
from typing import Any

import sgpu
from tests.benchmarks.table import show

_LIMIT_SECONDS = 2.0
KINDS = ("SIGSTOP", "Python loop", "blocking C call", "interpreter's lock held", "each waits for the other")


def _hangs(folder: str, rounds: int, limit: float) -> int:
    """Two ranks in DDP; every third step after the sixth, one hangs in another way, once."""
    import ctypes
    import json
    import os
    import pathlib
    import signal
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    def locks_twice(library: Any) -> None:
        mutex = ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)

    def hang(kind: str) -> None:
        if kind == "SIGSTOP":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind == "Python loop":
            while True:
                pass
        elif kind == "each waits for the other":
            dist.recv(torch.zeros(1), src=1 - rank)
        else:
            locks_twice(ctypes.CDLL(None) if kind == "blocking C call" else ctypes.PyDLL(None))

    sgpu.runtime.init()
    rank = sgpu.runtime.rank()
    model = DDP(torch.nn.Linear(4, 1))
    loop = sgpu.TrainLoop(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), max_steps=9 + 3 * rounds * len(KINDS),
        checkpoint_every=1,
    )  # fmt: skip
    for _ in loop:
        began = time.time()  # the section "step" begins
        number, rest = divmod(loop.step - 6, 3)
        mark = pathlib.Path(folder) / f"{number}.{rank}"
        if rest == 0 and 0 <= number < rounds * len(KINDS) and not mark.exists():
            kind = KINDS[number % len(KINDS)]
            if rank == 1 or kind == KINDS[-1]:
                mark.write_text(json.dumps({"silent_since": began, "kind": kind, "step": loop.step}))
                hang(kind)
        model(torch.ones(2, 4)).sum().backward()
    return loop.step


def _how_late(rounds: int) -> list[dict[str, Any]]:
    policy = sgpu.RestartPolicy(
        max_restarts=1000, backoff_seconds=0.01, hang_seconds=_LIMIT_SECONDS, section_seconds={"first_step": 60.0}
    )
    late: dict[str, list[float]] = {kind: [] for kind in KINDS}
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        run = sgpu.distributed(gpus=2, restarts=policy)(_hangs).submit(folder, rounds, _LIMIT_SECONDS)
        run.result()
        marks = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("*.1"))]
    failures = [event for event in run.events() if event["kind"] == "failure"]
    for mark in marks:
        told = [event for event in failures if event["step"] == mark["step"]]
        late[mark["kind"]] += [event["time"] - mark["silent_since"] - _LIMIT_SECONDS for event in told[:1]]
        wrong += [event["rank"] for event in told[:1]] != [None if mark["kind"] == KINDS[-1] else 1]
    rows: list[dict[str, Any]] = [
        {"what": f"hang: {kind}", "n": len(seconds), "median s after the limit": statistics.median(seconds),
         "most": max(seconds)}
        for kind, seconds in late.items()
    ]  # fmt: skip
    return [*rows, {"what": "hangs with the wrong rank named", "n": wrong}]


def _works(steps: int, slow_from: int, factor: float) -> int:
    """About 30 ms of matrix products a step on each rank, on cores that all share."""
    import time

    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    sgpu.runtime.init()
    torch.set_num_threads(1)
    last = sgpu.runtime.rank() == sgpu.runtime.world_size() - 1
    model = DDP(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    batch = torch.randn(64, 256)
    for _ in range(20):  # the second time, all is warm
        began = time.process_time()
        for _ in range(20):
            model.module(batch).mean().backward()
        seconds = (time.process_time() - began) / 20
    share = torch.tensor([max(1, int(0.03 / seconds))])
    torch.distributed.broadcast(share, src=0)
    loop = sgpu.TrainLoop(model=model, optimizer=optimizer, max_steps=steps, checkpoint_every=10**9)
    for _ in loop:
        slow = last and loop.step >= slow_from
        for _ in range(int(share * (factor if slow else 1))):
            model.module(batch).mean().backward()
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return loop.step


def _stragglers(ranks: int, steps: int) -> list[dict[str, Any]]:
    never = 10**9
    rows = []
    for name, slow_from in (
        (f"{ranks} equal ranks", never),
        (f"{ranks} ranks, one at half speed from the middle", steps // 2),
    ):
        run = sgpu.distributed(gpus=ranks)(_works).submit(steps, slow_from, 2.0)
        run.result()
        told = [event for event in run.events() if event["kind"] == "straggler"]
        right = [event for event in told if event["rank"] == ranks - 1 and event["step"] > slow_from]
        rows.append({
            "what": name, "n": steps, "named wrongly": len(told) - len(right),
            "steps until named": right[0]["step"] - slow_from if right else None,
            "ratio": right[0]["ratio"] if right else None,
        })  # fmt: skip
    return rows


def run(quick: bool) -> list[dict[str, Any]]:
    rows = _how_late(1 if quick else 6)
    for ranks in (2, 3):
        rows += _stragglers(ranks, 300 if quick else 1000)
    return rows


if __name__ == "__main__":
    show(run(quick=False))
