"""Losses that are not finite, or explode: judged, passed over, rolled back; on all ranks alike."""

from __future__ import annotations

import math
import pathlib
from typing import Any

import pytest
import torch

from sgpu import RestartPolicy, TrainLoop, distributed
from sgpu.checkpoint import Catalog
from sgpu.contract import records
from sgpu.contract.errors import DivergenceError, InputError
from sgpu.contract.rundir import RunDir
from sgpu.training import DivergencePolicy
from sgpu.training.divergence import limit_of
from tests.training.looping import Begin, Training, events, loader

pytestmark = pytest.mark.usefixtures("without_mlflow")


@pytest.mark.parametrize(
    ("losses", "factor", "limit"),
    [
        ([1.0] * 7, 10.0, math.inf),
        ([1.0] * 7 + [3.0], 10.0, 10.0),
        ([2.0] * 20, 5.0, 10.0),
        ([2.0] * 20, None, math.inf),
        ([-1.0] * 20, 5.0, math.inf),
        ([0.0] * 20, 5.0, math.inf),
    ],
)
def test_the_limit(losses: list[float], factor: float | None, limit: float) -> None:
    assert limit_of(losses, DivergencePolicy(factor=factor)) == limit


@pytest.mark.parametrize(
    "wrong", [{"action": "ignore"}, {"factor": 1.0}, {"factor": math.nan}, {"window": 3}, {"most_in_a_row": -1}]
)
def test_a_policy_that_makes_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong)).replace("action", "divergence")):
        DivergencePolicy(**wrong)
    with pytest.raises(InputError, match="divergence"):
        TrainLoop(max_steps=1, divergence="ignore")


def _weights_after(root: pathlib.Path, losses: dict[int, Any], **options: Any) -> tuple[list[int], Any]:
    """Steps that were trained, and the weight, where step k's loss is `losses[k]` or 1."""
    training = Training(root, checkpoint_every=100, **options)
    trained = []
    for batch in training.loop:
        step = training.loop.step + 1
        if training.loop.check(torch.tensor(losses.get(step, 1.0))):
            training.optimizer.zero_grad()
            training.model(batch[0]).square().mean().backward()
            training.optimizer.step()
            trained.append(step)
    return trained, training.model.weight.detach().clone()


def test_a_bad_batch_is_passed_over_and_leaves_the_weights_alone(root: pathlib.Path, supervised: Begin) -> None:
    run, _ = supervised()
    trained, _ = _weights_after(root, {2: math.nan, 4: math.inf}, divergence="skip")
    assert trained == [1, 3]
    assert [(e["step"], e["batch"], e["value"], e["action"]) for e in events(run, "diverged")] == [
        (2, 1, "nan", "skip"), (4, 3, "inf", "skip"),
    ]  # fmt: skip
    assert Catalog(str(root)).steps() == [4], "a step that was passed over is a step"


def test_an_exploding_loss_is_bad_and_does_not_move_the_limit(root: pathlib.Path, supervised: Begin) -> None:
    run, _ = supervised()
    policy = DivergencePolicy(action="skip", factor=4.0)
    trained, _ = _weights_after(root, {9: 3.9, 10: 4.5, 11: 100.0}, divergence=policy, loader=loader(24))
    assert trained == [*range(1, 10), 12]
    assert [event["value"] for event in events(run, "diverged")] == ["4.5", "100.0"]


def test_too_many_in_a_row_end_it(root: pathlib.Path, supervised: Begin) -> None:
    run, _ = supervised()
    policy = DivergencePolicy(action="skip", most_in_a_row=2)
    with pytest.raises(DivergenceError, match="3 bad batches in a row") as caught:
        _weights_after(root, {2: math.nan, 3: math.nan, 4: math.nan}, divergence=policy)
    assert (caught.value.step, caught.value.rank, caught.value.unrecoverable) == (4, 0, True)
    assert [event["action"] for event in events(run, "diverged")] == ["skip", "skip", "stop"]


def test_a_loss_that_is_not_one_number_is_refused(root: pathlib.Path, supervised: Begin) -> None:
    supervised()
    with pytest.raises(InputError, match=r"'loss' must be one number; found tensor.*shape \(2,\)"):
        _weights_after(root, {2: [1.0, 2.0]})


def test_stop_is_the_default_and_says_what_else_there_is(root: pathlib.Path, supervised: Begin) -> None:
    supervised()
    with pytest.raises(
        DivergenceError, match=r"loss of rank 0 in step 3 is nan; expected a finite number.*skip"
    ) as caught:
        _weights_after(root, {3: math.nan})
    assert caught.value.unrecoverable


def test_a_restart_judges_by_the_same_losses(root: pathlib.Path, supervised: Begin) -> None:
    supervised()
    training = Training(root, checkpoint_every=100, loader=loader(24))
    for _ in training.loop:
        assert training.loop.check(2.0)
        if training.loop.step == 8:
            training.loop.stop()
    supervised()
    again = Training(root, checkpoint_every=100, loader=loader(24))
    next(iter(again.loop))
    with pytest.raises(DivergenceError, match="at most 20"):
        again.loop.check(20.5)


def _train(folder: str, action: str, bad_step: int) -> list[float]:
    import math

    import torch

    import sgpu

    sgpu.runtime.init()
    rank = sgpu.runtime.rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loop = sgpu.TrainLoop(
        model=model, optimizer=optimizer, max_steps=8, checkpoint_every=3, checkpoints=folder, divergence=action
    )
    for _ in loop:
        loss = model(torch.full((1, 2), loop.step + 1.0)).square().sum()
        if loop.check(math.nan if loop.step + 1 == bad_step and rank == 1 else loss):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.slow
def test_two_ranks_roll_back_and_end_as_if_they_had_passed_it_over(tmp_path: pathlib.Path) -> None:
    """One rank's loss is bad; all do the same; the weights are those of a run that skipped, to the bit."""
    train = distributed(gpus=2, restarts=RestartPolicy(max_restarts=2))(_train)
    skipped = train.submit(str(tmp_path / "skip"), "skip", 5)
    expected = skipped.result(timeout_seconds=90)
    rolled = train.submit(str(tmp_path / "back"), "roll_back", 5)
    assert rolled.result(timeout_seconds=90) == expected
    assert expected[0] == expected[1]
    assert (skipped.status.restarts, rolled.status.restarts) == (0, 1)
    told = [e for e in records.read_all(RunDir(pathlib.Path(rolled.path)).events) if e["kind"] == "diverged"]
    assert [(event["rank"], event["step"], event["action"]) for event in told] == [(1, 5, "roll_back")]
