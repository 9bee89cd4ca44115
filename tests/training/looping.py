"""A small loop that the tests of TrainLoop share."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from sgpu import CheckpointPolicy, TrainLoop
from sgpu.contract import records
from sgpu.contract.heartbeat import Slot
from sgpu.contract.rundir import RunDir

Begin = Callable[[], tuple[RunDir, Slot]]


def loader(samples: int = 8, batch_size: int = 2, **options: Any) -> Any:
    data = torch.utils.data.TensorDataset(torch.arange(float(samples))[:, None])
    return torch.utils.data.DataLoader(data, batch_size=batch_size, **options)


class Training:
    """A weight that each optimizer step changes."""

    made: ClassVar[list[Training]] = []

    def __init__(self, root: pathlib.Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        if isinstance(options.get("checkpoints"), dict):
            options["checkpoints"] = CheckpointPolicy(str(root), **options["checkpoints"])
        self.loop = TrainLoop(
            model=self.model, optimizer=self.optimizer, **{"loader": loader(), "checkpoints": str(root), **options}
        )
        self.made.append(self)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loop:
            self.optimizer.zero_grad()
            self.model(batch[0]).square().mean().backward()
            self.optimizer.step()
            yield batch

    def run(self) -> int:
        return sum(1 for _ in self)


def stopped_in_the_middle(root: pathlib.Path, supervised: Begin, **options: Any) -> None:
    supervised()
    training = Training(root, checkpoint_every=100, **options)
    for _ in training:
        if training.loop.step == 2:
            training.loop.stop()
    assert training.loop.step == 3


def events(run: RunDir, kind: str) -> list[dict[str, Any]]:
    return [record for record in records.read_all(run.events) if record["kind"] == kind]


class Average:
    """An exponential moving average of the weights, with warm-up by a plain counter."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.updates = 0
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        self.updates += 1
        decay = min(0.9, self.updates / (self.updates + 3))
        for name, value in model.named_parameters():
            self.weights[name].lerp_(value.detach(), 1 - decay)

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": {name: value.clone() for name, value in self.weights.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = int(state["updates"])
        for name, value in state["weights"].items():
            self.weights[name].copy_(value)
