"""A run on two nodes: one is lost with agent, helper and worker; the restart is from its neighbour's memory."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import cloudpickle

import sgpu
from sgpu import CheckpointPolicy, Local, distributed

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def job() -> float:
    import os
    import signal
    import time

    import torch

    from sgpu import TrainLoop, settings
    from sgpu.contract import process, records

    sgpu.runtime.init()
    rank, root = sgpu.runtime.rank(), settings.run_dir()
    assert root is not None
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def wait_for_copies(step: int) -> None:
        deadline = time.monotonic() + 30
        while True:
            events = records.read_all(root / "events.jsonl")
            if len([one for one in events if one["kind"] == "checkpoint_copied" and one["step"] == step]) == 2:
                return
            assert time.monotonic() < deadline, events
            time.sleep(0.05)

    def lose_this_node() -> None:
        agent = process.read_process(root / "nodes" / "1" / "agent.json")
        assert agent is not None
        family = [agent.pid, *process.descendants(agent.pid)]
        (root / "fired").write_text(repr(family))
        for pid in family:
            if pid != os.getpid():
                os.kill(pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    loss = torch.zeros(())
    loop = TrainLoop(model=model, optimizer=optimizer, max_steps=6)
    for _ in loop:
        if loop.step == 4 and settings.generation() == 0:
            wait_for_copies(4)
            if rank == 1:
                lose_this_node()
        optimizer.zero_grad()
        loss = model(torch.randn(4, 300)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_a_run_goes_on_from_a_neighbours_memory(without_mlflow: None) -> None:
    policy = CheckpointPolicy(every_steps=2, peer_memory=True)
    run = distributed(gpus=2, restarts=1, on=Local(nodes=2), checkpoints=policy)(job).submit()
    results: list[Any] = []
    try:
        results = run.result(timeout_seconds=100)
    finally:
        run.cancel()
        sgpu.cleanup()
    assert len(results) == 2
    assert (pathlib.Path(run.path) / "fired").exists()
    kinds = [event["kind"] for event in run.events()]
    assert "node_lost" in kinds
    restored = [event for event in run.events() if event["kind"] == "restored"]
    assert [(event["step"], event["source"]) for event in restored] == [(4, "peer memory")]
    assert not [event for event in restored if event["again_steps"] > 1]  # it had done no more than four
