"""A checkpoint that does not fit the loop: refused in both directions, by the names of what is missing or too much."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgpu import CheckpointPolicy, TrainLoop
from sgpu.checkpoint import Checkpointer
from sgpu.contract.errors import CheckpointMismatchError, InputError

Begin = Callable[[], Any]


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def net(width: int = 4, *, deep: bool = False) -> torch.nn.Module:
    layers: list[torch.nn.Module] = [torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width)]
    return torch.nn.Sequential(*layers, *([torch.nn.Linear(width, 1)] if deep else []))


def parts(**other: Any) -> dict[str, Any]:
    model = other.pop("model", None) or net()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    made = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "extra": {"counter": Counter()}}
    return {**made, **other}


def run(root: pathlib.Path, **options: Any) -> TrainLoop:
    loop = TrainLoop(max_steps=2, checkpoints=str(root), **options)
    for _ in loop:
        model, optimizer = options["model"], options["optimizer"]
        model(torch.randn(3, 2)).square().mean().backward()
        optimizer.step()
    return loop


CASES: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a layer too many": (lambda: parts(model=net(deep=True)), r"not in the checkpoint: .*model\.2\.bias"),
    "another width": (lambda: parts(model=net(5)), r"model\.0\.weight \(saved float32\[4, 2\], live float32\[5, 2\]\)"),
    "another dtype": (lambda: parts(model=net().double()), r"model\.0\.bias \(saved float32\[4\], live float64\[4\]\)"),
    "no scheduler": (lambda: parts(scheduler=None), r"only in the checkpoint: .*scheduler"),
    "no extra": (lambda: parts(extra=None), r"only in the checkpoint: .*counter"),
    "an extra too many": (
        lambda: parts(extra={"counter": Counter(), "average": Counter()}), r"not in the checkpoint: .*average"
    ),
    "an extra renamed": (
        lambda: parts(extra={"counts": Counter()}), r"not in the checkpoint: counts\. only in the checkpoint: counter"
    ),
    "no optimizer": (lambda: parts(optimizer=None, scheduler=None), r"only in the checkpoint: .*optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_named(name: str, tmp_path: pathlib.Path, supervised: Begin) -> None:
    supervised()
    first = parts()
    run(tmp_path, **first)
    supervised()
    make, told = CASES[name]
    other = make()
    before = {key: value.clone() for key, value in other["model"].state_dict().items()}
    with pytest.raises(CheckpointMismatchError, match=told):
        TrainLoop(max_steps=2, checkpoints=str(tmp_path), **other)
    for key, value in other["model"].state_dict().items():
        assert torch.equal(value, before[key]), "what was refused has changed nothing"
    supervised()
    again = run(tmp_path, **parts())
    assert again.finished
    assert again.restored is not None


def test_a_checkpoint_of_no_loop_is_named(tmp_path: pathlib.Path, supervised: Begin) -> None:
    supervised()
    model = net()
    checkpointer = Checkpointer(CheckpointPolicy(str(tmp_path)), {"model": model})
    checkpointer.save(3)
    checkpointer.close()
    with pytest.raises(CheckpointMismatchError, match=r"not in the checkpoint: .*progress"):
        TrainLoop(model=model, max_steps=5, checkpoints=str(tmp_path))


def test_a_model_that_is_not_built_yet_is_refused_when_the_loop_is_made(
    tmp_path: pathlib.Path, supervised: Begin
) -> None:
    """Else it would train, and fail when it resumes."""
    supervised()
    model = torch.nn.Sequential(torch.nn.LazyLinear(4), torch.nn.Linear(4, 1))
    with pytest.raises(InputError, match=r"model\.0\.weight has no shape yet.*run one batch through the model"):
        TrainLoop(model=model, max_steps=2, checkpoints=str(tmp_path))
    model(torch.randn(3, 2))
    assert sum(1 for _ in TrainLoop(model=model, max_steps=2, checkpoints=str(tmp_path))) == 2


def test_a_model_without_data_is_refused_when_the_loop_is_made(tmp_path: pathlib.Path, supervised: Begin) -> None:
    """Else a restore would seem to succeed, and the weights be nowhere."""
    supervised()
    with torch.device("meta"):
        model = torch.nn.Linear(2, 1)
    with pytest.raises(InputError, match=r"model\.weight has no data \(it is on the meta device\).*to_empty"):
        TrainLoop(model=model, max_steps=2, checkpoints=str(tmp_path))
