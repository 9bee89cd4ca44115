"""Restarts that keep their processes, in real runs: who stays, what comes out, and that nothing grows."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgpu import RestartPolicy, Run, distributed
from tests.faults.momentum import uninterrupted

pytestmark = pytest.mark.slow

NIGHTLY = os.environ.get("NIGHTLY") == "true"
_STEPS = 4  # a generation


def _train(folder: str, faults: list[tuple[str, int]]) -> torch.Tensor:
    """In generation g, the g-th fault strikes in the middle of its steps."""
    import json
    import os
    import pathlib
    import time

    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP

    import sgpu
    from sgpu import TrainLoop, settings

    sgpu.runtime.init()
    rank, generation = sgpu.runtime.rank(), settings.generation()
    here = {"generation": generation, "rank": rank, "pid": os.getpid(), "seen": os.environ.get("LEFT")}
    resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    here |= {"fds": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}
    with pathlib.Path(folder, f"calls{rank}").open("a") as log:
        log.write(json.dumps({**here, "resident": resident}) + "\n")
    os.environ["LEFT"] = "by an earlier call"

    def strike() -> None:
        if generation >= len(faults) or faults[generation][1] != rank:
            return
        kind = faults[generation][0]
        with pathlib.Path(folder, "fired").open("a") as log:
            log.write(f"{generation} {kind}\n")
        if kind == "raise":
            raise RuntimeError(f"of generation {generation}")
        if kind == "kill":
            os.kill(os.getpid(), 9)
        if kind == "sleep":
            time.sleep(10_000)
        while kind == "spin":
            pass

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loop = TrainLoop(model=model, optimizer=optimizer, max_steps=4 * (generation + 1), checkpoint_every=1)
    for count, step in enumerate(loop):
        if count == 2:
            strike()
        optimizer.zero_grad()
        model(torch.tensor([1.0, 2.0, 3.0]) * (step % 5 + 1)).backward()
        optimizer.step()
    return model.module.weight.detach()


def _run(folder: pathlib.Path, faults: list[tuple[str, int]], seconds: float) -> tuple[Run, list[Any]]:
    policy = RestartPolicy(max_restarts=len(faults) + 1, backoff_seconds=0.0, hang_seconds=2.0, start_seconds=60.0)
    run = distributed(gpus=2, restarts=policy)(_train).submit(str(folder), faults)
    results = run.result(seconds)
    assert (folder / "fired").read_text().splitlines() == [f"{at} {kind}" for at, (kind, _) in enumerate(faults)]
    assert run.status.restarts == len(faults), "no extra attempt"
    for result in results:
        assert torch.equal(result, uninterrupted(_STEPS * (len(faults) + 1)))
    return run, results


def _calls(folder: pathlib.Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"calls{rank}").read_text().splitlines()]


def _kept(run: Run) -> list[list[int]]:
    return [event["kept"] for event in run.events() if event["kind"] == "restarting"]


@pytest.mark.timeout(240)
def test_only_those_that_died_are_replaced(tmp_path: pathlib.Path, left: Callable[[Run], list[int]]) -> None:
    """Exceptions, deaths, also of rank 0, and hangs, in which the other rank is stuck in a collective."""
    faults = [("raise", 1), ("kill", 0), ("sleep", 1), ("spin", 0), ("kill", 1), ("raise", 0)]
    run, _ = _run(tmp_path, faults, 220)
    assert _kept(run) == [[0, 1], [1], [0, 1], [0, 1], [0], [0, 1]]
    for rank, deaths in ((0, (1,)), (1, (4,))):
        calls = _calls(tmp_path, rank)
        assert [call["generation"] for call in calls] == list(range(len(faults) + 1))
        pids = [call["pid"] for call in calls]
        assert [at for at in range(len(faults)) if pids[at] != pids[at + 1]] == list(deaths)
        assert {call["seen"] for call in calls} == {None}, "each call finds the environment of the first"
    causes = [event["cause"] for event in run.events() if event["kind"] == "failure"]
    assert causes[0] == causes[5] == "RuntimeError"
    assert causes[1] == causes[4] == "SIGKILL, signal 9"
    assert causes[2].startswith("no step for")
    assert left(run) == []


def _flat(folder: pathlib.Path, restarts: int) -> None:
    for rank in (0, 1):
        calls = _calls(folder, rank)
        assert len({call["pid"] for call in calls}) == 1, "one process went through all restarts"
        for what, more in (("fds", 0), ("threads", 0), ("resident", 2**22 + restarts * 100_000)):
            early, late = (min(call[what] for call in part) for part in (calls[1:6], calls[-5:]))
            assert late <= early + more, what


@pytest.mark.timeout(1200 if NIGHTLY else 240)
@pytest.mark.parametrize(("kind", "restarts"), [("raise", 200 if NIGHTLY else 20), ("kill", 200 if NIGHTLY else 5)])
def test_restarts_in_a_row_leave_nothing_behind(kind: str, restarts: int, tmp_path: pathlib.Path) -> None:
    run, _ = _run(tmp_path, [(kind, 1) for _ in range(restarts)], 1100 if NIGHTLY else 220)
    assert _kept(run) == [[0, 1] if kind == "raise" else [0]] * restarts
    calls = _calls(tmp_path, 0)
    assert len({call["pid"] for call in calls}) == 1, "one process went through all restarts"
    for what, more in (("fds", 0), ("threads", 0), ("resident", 2**22 + restarts * 100_000)):
        early, late = (min(call[what] for call in part) for part in (calls[1:6], calls[-5:]))
        assert late <= early + more, what


def test_a_process_that_is_not_what_it_was_is_replaced(tmp_path: pathlib.Path) -> None:
    @distributed(gpus=1, restarts=RestartPolicy(backoff_seconds=0.0))
    def train(folder: str) -> list[int]:
        import os
        import pathlib
        import threading
        import time

        import torch

        from sgpu import TrainLoop, settings

        with pathlib.Path(folder, "pids").open("a") as log:
            log.write(f"{os.getpid()}\n")
        generation = settings.generation()
        model = torch.nn.Linear(1, 1)
        loop = TrainLoop(
            model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_steps=3 * (generation + 1),
            checkpoint_every=1,
        )  # fmt: skip
        for count, _ in enumerate(loop):
            if count == 1 and generation == 0:
                unpatched = torch.nn.functional.relu
                torch.nn.functional.relu = lambda x, call=unpatched: call(x)
                raise RuntimeError("patched")
            if count == 1 and generation == 1:
                threading.Thread(target=time.sleep, args=(10_000,), daemon=True, name="left over").start()
                raise RuntimeError("threaded")
            if count == 1 and generation == 2:
                raise RuntimeError("clean")
        return [int(line) for line in pathlib.Path(folder, "pids").read_text().split()]

    run = train.submit(str(tmp_path))
    ((first, second, third, fourth),) = run.result(100)
    assert len({first, second, third}) == 3
    assert third == fourth
    assert _kept(run) == [[], [], [0]]
    said = [pathlib.Path(run.path, "attempts", str(at), "rank0", "log").read_text() for at in (0, 1)]
    assert "torch.nn.functional.relu was replaced" in said[0]
    assert "its thread 'left over' still runs" in said[1]
