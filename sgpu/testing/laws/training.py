"""What a law trains: dropout, batch norm, AdamW and a scheduler; to be derived from for other kinds of state."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from sgpu.training import TrainLoop


class Training:
    """Order of calls: `parts` once, for the loop; then, for each batch, `begin`, `loss`, `learn`; `digest` at the end.

    Attributes:
        model, optimizer, scheduler: what `TrainLoop` takes; None: without.
        extra: what it takes as extra.
    """

    def __init__(self, width: int) -> None:
        self.model: torch.nn.Module = torch.nn.Sequential(
            torch.nn.Linear(width, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        )  # fmt: skip
        self.optimizer = self.make_optimizer()
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.7)
        self.extra: dict[str, Any] = {}

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "extra": self.extra,
        }  # fmt: skip

    def begin(self, loop: TrainLoop) -> None:
        """Before a batch: what the user's code changes at a certain step."""

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(rows).square().mean()
        return found

    def learn(self, loop: TrainLoop, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if loop.is_update_step:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def rate(self) -> float:
        """The learning rate, which the law compares at each batch."""
        return float(self.optimizer.param_groups[0]["lr"])

    def digest(self, loop: TrainLoop) -> str:
        """Of counters, weights, buffers, the optimizer's state and all other parts, by name."""
        found = hashlib.sha256(f"{loop.step} {loop.epoch}".encode())
        for name, value in self.model.state_dict().items():
            _add(found, name, value)
        for name, parameter in self.model.named_parameters():
            _add(found, name, self.optimizer.state.get(parameter, {}))
        for group in sorted(self.optimizer.param_groups, key=lambda group: sum(map(torch.numel, group["params"]))):
            _add(found, "group", {key: value for key, value in group.items() if key != "params"})
        for name, part in sorted({"scheduler": self.scheduler, **self.extra}.items()):
            _add(found, name, part.state_dict())
        return found.hexdigest()


def _add(found: Any, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        found.update(name.encode() + value.detach().cpu().numpy().tobytes())
    elif isinstance(value, dict):
        for key, inner in sorted(value.items(), key=lambda item: str(item[0])):
            _add(found, f"{name}/{key}", inner)
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            _add(found, f"{name}/{place}", inner)
    else:
        found.update(f"{name}={value!r}".encode())
