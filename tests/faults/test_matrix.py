"""Fault x place x rank, one after the other in one run: each fires and is told as what it was; nothing is lost."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable

import pytest
import torch

from sgpu import RestartPolicy, Run, distributed
from tests.faults.momentum import uninterrupted

pytestmark = pytest.mark.slow

_STEPS = 4  # a generation
_CAUSES = {
    "kill": "SIGKILL, signal 9", "segv": "SIGSEGV, signal 11", "exit": "exit code 3", "leave": "exit code 0",
    "raise": "FaultError", "stop": "no step for",
}  # fmt: skip


def _faults(kinds: tuple[str, ...]) -> list[tuple[str, str, int]]:
    """Every kind at every place on both ranks.

    A place that is reached by training comes before each that is not, and neighbours differ in kind: the same failure
    at the same step would rightly end the run as a crash loop, and so would a raise before the first step.
    """
    later = kinds[1:] + kinds[:1]
    reached = [(kind, place, rank) for place, rank in itertools.product(("finish", "middle"), (0, 1)) for kind in kinds]
    early = [(kind, place, rank) for place, rank in itertools.product(("first", "before"), (0, 1)) for kind in later]
    return [fault for pair in zip(reached, early, strict=True) for fault in pair]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kinds", [("kill", "raise", "segv"), ("stop", "exit", "leave")], ids="-".join)
def test_every_fault_at_every_place(
    kinds: tuple[str, ...], tmp_path: pathlib.Path, left: Callable[[Run], list[int]]
) -> None:
    faults = _faults(kinds)

    class FaultError(Exception):
        pass

    policy = RestartPolicy(max_restarts=50, backoff_seconds=0.01, hang_seconds=1.0)

    @distributed(gpus=2, restarts=policy)
    def train(folder: str) -> torch.Tensor:
        import os
        import pathlib
        import signal

        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP

        import sgpu
        from sgpu import TrainLoop, settings

        sgpu.runtime.init()
        rank, generation = sgpu.runtime.rank(), settings.generation()

        def strike(place: str) -> None:
            if generation >= len(faults) or faults[generation][1:] != (place, rank):
                return
            kind = faults[generation][0]
            with pathlib.Path(folder, "fired").open("a") as log:
                log.write(f"{generation} {kind} {place} {rank}\n")
            if kind == "raise":
                raise FaultError(f"at {place}")
            if kind in ("exit", "leave"):
                os._exit(3 if kind == "exit" else 0)
            number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV}[kind]
            signal.raise_signal(number)

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = torch.nn.Parameter(torch.zeros(3))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return (self.weight * x).sum()

        strike("before")
        model = DDP(Net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loop = TrainLoop(model=model, optimizer=optimizer, max_steps=_STEPS * (generation + 1), checkpoint_every=1)
        for count, step in enumerate(loop):
            strike({0: "first", 2: "middle"}.get(count, ""))
            optimizer.zero_grad()
            model(torch.tensor([1.0, 2.0, 3.0]) * (step % 5 + 1)).backward()
            optimizer.step()
        strike("finish")
        return model.module.weight.detach()

    run = train.submit(str(tmp_path))
    results = run.result(280)
    fired = [tuple(line.split()) for line in (tmp_path / "fired").read_text().splitlines()]
    assert fired == [(str(number), kind, place, str(rank)) for number, (kind, place, rank) in enumerate(faults)]
    failures = [event for event in run.events() if event["kind"] == "failure"]
    told = [(event["generation"], event["rank"], event["cause"].rpartition(".")[2]) for event in failures]
    for (generation, rank, cause), (kind, place, expected_rank) in zip(told, faults, strict=True):
        assert cause.startswith(_CAUSES[kind]), (generation, kind, place)
        assert rank == expected_rank, (generation, kind, place)
    assert run.status.restarts == len(faults)
    expected = uninterrupted(_STEPS * (len(faults) + 1))
    for result in results:
        assert torch.equal(result, expected)
    assert left(run) == []
