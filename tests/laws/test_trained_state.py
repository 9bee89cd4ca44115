"""The resume law for the kinds of state that trainings have: killed at each step, all ends as it would."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from sgpu import TrainLoop
from sgpu.data import DataLoader
from sgpu.testing.laws.fresh import FreshProcesses
from sgpu.testing.laws.resume import ResumeCase, check_resume_at_every_step
from sgpu.testing.laws.training import Training

COUNT = 12


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(number), torch.full((4,), number / COUNT) + torch.rand(4)


def read(batch: Any) -> tuple[list[int], torch.Tensor]:
    numbers, features = batch
    return numbers.tolist(), features


def make_loader() -> Any:
    return DataLoader(Samples(), 2, shuffle=True, num_workers=0, seed=3)


class Average:
    """Of the weights, with warm-up by a plain counter."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.updates = 0
        self.weights = {name: value.detach().clone() for name, value in model.named_parameters()}

    def update(self, model: torch.nn.Module) -> None:
        self.updates += 1
        for name, value in model.named_parameters():
            self.weights[name].lerp_(value.detach(), 1 / (self.updates + 1))

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": {name: value.clone() for name, value in self.weights.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = int(state["updates"])
        for name, value in state["weights"].items():
            self.weights[name].copy_(value)


class ScaledAndAveraged(Training):
    """A scaler that moves and meets an overflow, two averages, and a value of the user's."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.average = Average(self.model)
        self.swa = torch.optim.swa_utils.AveragedModel(self.model)
        self.extra = {"scaler": self.scaler, "average": self.average, "swa": self.swa}

    def learn(self, loop: TrainLoop, loss: torch.Tensor) -> None:
        if loop.step == 2:
            loss = loss * float("inf")  # the scaler leaves this step out and halves its scale
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.average.update(self.model)
        self.swa.update_parameters(self.model)


class PartlyFrozen(Training):
    """The optimizer has all parameters; those of the first layer never get a state."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.layer(0).requires_grad_(False)

    def layer(self, number: int) -> torch.nn.Module:
        assert isinstance(self.model, torch.nn.Sequential)
        return self.model[number]


class LaterFrozen(PartlyFrozen):
    """The last layer is frozen from step 2 on, the first thawed from step 3 on: state that stays, and that begins."""

    def begin(self, loop: TrainLoop) -> None:
        self.layer(4).requires_grad_(loop.step < 2)
        self.layer(0).requires_grad_(loop.step >= 3)


class NeverStepped(Training):
    """A second model whose gradients grow and whose optimizer waits for ever."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.other = torch.nn.Linear(width, 1)
        self.waiting = torch.optim.Adam(self.other.parameters(), lr=0.3)
        self.extra = {"other": self.other, "waiting": self.waiting}

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        return super().loss(rows) + self.other(rows).square().mean()


class MadeLater(Training):
    """The optimizer is made when the first gradients are there, as libraries do that wrap the model first."""

    class Optimizer:
        def __init__(self, model: torch.nn.Module) -> None:
            self.model, self.made = model, list[torch.optim.Optimizer]()

        def get(self) -> torch.optim.Optimizer:
            if not self.made:
                self.made.append(torch.optim.AdamW(self.model.parameters(), lr=0.05))
            return self.made[0]

        def state_dict(self) -> dict[str, Any]:
            return self.made[0].state_dict() if self.made else {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state:
                self.get().load_state_dict(state)

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.later = self.Optimizer(self.model)
        self.extra = {"later": self.later}

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "extra": self.extra}

    def learn(self, loop: TrainLoop, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.later.get().step()
        self.later.get().zero_grad()


class InAnyOrder(Training):
    """Each process gives the parameters of its groups in an order of its own, as sets do."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        found = list(self.model.parameters())
        turn = os.getpid() % 3
        groups = [[value for value in found if value.dim() == dim] for dim in (1, 2)]
        return torch.optim.AdamW([{"params": [*group[turn:], *group[:turn]], "lr": 0.05} for group in groups])


class Plateau(Training):
    """Momentum that is made at the first step, and a scheduler that remembers losses."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)

    def learn(self, loop: TrainLoop, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step(loss.detach().item())


CASES: dict[str, ResumeCase] = {
    kind.__name__: ResumeCase(
        make_loader=make_loader, read=read, each_epoch=tuple(range(COUNT)), make_training=kind, options={"epochs": 1}
    )
    for kind in (ScaledAndAveraged, PartlyFrozen, LaterFrozen, NeverStepped, MadeLater, InAnyOrder, Plateau)
} | {
    "killed inside of a group": ResumeCase(
        make_loader=make_loader, read=read, each_epoch=tuple(range(COUNT)), into_step=1,
        options={"epochs": 2, "accumulate": 4},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def processes() -> Iterator[FreshProcesses]:
    with FreshProcesses() as warm:
        yield warm


@pytest.mark.parametrize("name", CASES)
def test_killed_at_every_step_it_goes_on_as_it_would_have(
    name: str, tmp_path: pathlib.Path, processes: FreshProcesses
) -> None:
    whole = check_resume_at_every_step(CASES[name], tmp_path, processes)
    assert whole.records[-1][0] == (3 if name == "killed inside of a group" else 5)


class Forgetful(ScaledAndAveraged):
    """Its average is left out."""

    def parts(self) -> dict[str, Any]:
        return {**super().parts(), "extra": {"scaler": self.scaler, "swa": self.swa}}


def test_the_law_finds_a_part_that_is_left_out(tmp_path: pathlib.Path, processes: FreshProcesses) -> None:
    case = ResumeCase(
        make_loader=make_loader, read=read, each_epoch=tuple(range(COUNT)), make_training=Forgetful,
        options={"epochs": 1},
    )  # fmt: skip
    with pytest.raises(AssertionError, match="all steps were the same, but not the weights at the end"):
        check_resume_at_every_step(case, tmp_path, processes)
