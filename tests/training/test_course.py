"""Groups, epochs and metrics of a loop, and what it does not believe."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sgpu import TrainLoop
from sgpu.checkpoint import Catalog
from sgpu.contract.errors import InputError, PositionError
from sgpu.data import DataLoader
from tests.training.looping import Begin, Training, events, loader, stopped_in_the_middle

MODEL = torch.nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def test_ten_batches_in_groups_of_four_are_three_steps_with_every_batch_used(
    root: pathlib.Path, supervised: Begin
) -> None:
    supervised()
    batches, due = 0, []
    loop = TrainLoop(loader=loader(10, 1), accumulate=4, checkpoints=str(root))
    for _ in loop:
        batches += 1
        if loop.is_update_step:
            due.append(batches)
    assert (batches, due, loop.step) == (10, [4, 8, 10], 3)
    assert Catalog(str(root)).steps() == [3]


def test_an_epoch_that_goes_on_with_other_batches_ends_where_its_samples_end(
    root: pathlib.Path, supervised: Begin
) -> None:
    """Its length is no longer len(loader): 20 samples, 3 batches of 2 done, the rest in batches of 3."""

    def made(batch_size: int) -> Any:
        data = torch.utils.data.TensorDataset(torch.arange(20.0)[:, None])
        return DataLoader(data, batch_size=batch_size, num_workers=0)

    stopped_in_the_middle(root, supervised, loader=made(2))
    run, slot = supervised()
    with pytest.warns(UserWarning, match="saved with batch_size 2 and goes on with 3"):
        rest = Training(root, loader=made(3), epochs=2)
    batches = [batch[0][:, 0].tolist() for batch in rest]
    assert [len(batch) for batch in batches] == [3, 3, 3, 3, 2, *[3] * 6, 2]
    assert [sample for batch in batches for sample in batch] == [*range(6, 20), *range(20)]
    assert rest.loop.step == slot.read().total_steps == 3 + 5 + 7
    assert [event["epoch"] for event in events(run, "epoch_ended")] == [0, 1]


def test_global_batches_in_parts_are_steps(root: pathlib.Path, supervised: Begin) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(22.0)[:, None])
    supervised()
    loop = TrainLoop(
        loader=DataLoader(data, 3, num_workers=0, global_batch_size=8), checkpoints=str(root), epochs=2
    )  # fmt: skip
    due = []
    for number, _ in enumerate(loop, start=1):
        if loop.is_update_step:
            due.append(number)
    assert (due, loop.step) == ([4, 8, 11, 15, 19, 22], 6)
    supervised()
    with pytest.raises(InputError, match=r"accumulate=3\): the loader gives its global batch of 8 samples in 4 parts"):
        TrainLoop(loader=DataLoader(data, 3, num_workers=0, global_batch_size=8), accumulate=3)
    whole = DataLoader(data, num_workers=0, global_batch_size=8)
    several = TrainLoop(loader=whole, accumulate=2, checkpoints=str(root / "other"))
    assert sum(1 for _ in several) == 3
    assert several.step == 2


@pytest.mark.parametrize("own", [True, False], ids=["sgpu", "torch"])
@pytest.mark.parametrize("stop_at", [0, 1, 2, 3])
def test_a_group_that_the_end_of_an_uncounted_epoch_cuts_short_is_a_step(
    root: pathlib.Path, supervised: Begin, own: bool, stop_at: int
) -> None:
    """22 samples in batches of 4: 6 batches an epoch, that is a step of four and one of the two that are left."""

    class Uncounted(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(22))

    def loop() -> TrainLoop:
        supervised()
        made = DataLoader if own else torch.utils.data.DataLoader
        data: Any = made(Uncounted(), 4, num_workers=0)
        return TrainLoop(loader=data, epochs=2, accumulate=4, checkpoints=str(root))

    seen, steps = [], []
    for stops in (True, False):
        whole = loop()
        for batch in whole:
            seen.append((whole.epoch, whole.step, batch.tolist()[0], whole.is_update_step))
            if stops and (whole.step, whole.is_update_step) == (stop_at, True):
                whole.stop()
        steps.append(whole.step)
    numbers = [(number, number in (12, 20)) for number in range(0, 24, 4)]
    assert seen == [(e, 2 * e + number // 16, number, due) for e in (0, 1) for number, due in numbers]
    assert steps == [stop_at + 1, 4]


def test_groups_begin_anew_where_the_loop_resumes_with_others(root: pathlib.Path, supervised: Begin) -> None:
    """8 batches: two steps of 3, then one of 2 that the rest gives."""
    supervised()
    first = Training(root, loader=loader(16), accumulate=3, checkpoint_every=1)
    for _ in first:
        if first.loop.step == 0 and first.loop.is_update_step:
            first.loop.stop()
    supervised()
    rest = Training(root, loader=loader(16), accumulate=2)
    due = [rest.loop.is_update_step for _ in rest]
    assert (first.loop.step, due, rest.loop.step) == (1, [False, True, False, True, True], 4)


def test_the_last_metrics_are_there_where_nothing_is_left_to_do(root: pathlib.Path, supervised: Begin) -> None:
    supervised()
    training = Training(root, checkpoint_every=1)
    assert (training.loop.metrics, training.loop.finished) == ({}, False)
    for number, _ in enumerate(training):
        training.loop.log(loss=torch.tensor(0.5 + number, requires_grad=True), first=1 - min(number, 1))
        if number == 3:
            training.loop.log(loss=7)
    assert training.loop.metrics == {"loss": 7.0, "first": 0.0}
    assert training.loop.finished
    supervised()
    again = Training(root)
    assert again.loop.finished
    assert again.run() == 0
    assert again.loop.metrics == {"loss": 7.0, "first": 0.0}


def test_metrics_of_the_checkpoint_are_those_of_its_step(root: pathlib.Path, supervised: Begin) -> None:
    supervised()
    training = Training(root, checkpoint_every=2)
    total = torch.zeros(())
    for _ in training:
        total += 1  # in place: what is kept must not follow it
        training.loop.log(total=total)
        if training.loop.step == 2:
            break
    training.loop._checkpointer.close()
    supervised()
    assert Training(root).loop.metrics == {"total": 2.0}


class Short(torch.utils.data.Dataset[torch.Tensor]):
    """Says fewer samples than its sampler gives."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.ones(1)


class TooMany(torch.utils.data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 1, 2, 3, 0, 1])

    def __len__(self) -> int:
        return 4


def test_a_loader_that_gives_more_than_its_length_is_not_believed(root: pathlib.Path, supervised: Begin) -> None:
    supervised()
    training = Training(root, loader=torch.utils.data.DataLoader(Short(), batch_size=2, sampler=TooMany()))
    with pytest.raises(InputError, match=r"len\(loader\) is 2, but it gave more batches; mend __len__"):
        training.run()


def test_a_loader_that_gives_nothing_is_refused(root: pathlib.Path, supervised: Begin) -> None:
    supervised()
    with pytest.raises(InputError, match=r"gave no batch in epoch 0: .*drop_last=True"):
        Training(root, loader=loader(3, 4, drop_last=True)).run()


def test_a_loader_that_became_shorter_is_refused_by_name(root: pathlib.Path, supervised: Begin) -> None:
    stopped_in_the_middle(root, supervised)
    supervised()
    with pytest.raises(PositionError, match=r"made after batch 3 of epoch 0, but the loader ended after 2"):
        Training(root, loader=loader(4)).run()


def test_a_loader_with_other_generators_is_refused_by_name(root: pathlib.Path, supervised: Begin) -> None:
    stopped_in_the_middle(root, supervised, loader=loader(shuffle=True, generator=torch.Generator()))
    supervised()
    with pytest.raises(PositionError, match=r"1 torch.Generator\(s\) of the loader .* this loader has 0"):
        Training(root).run()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"epochs": 0}, r"TrainLoop\(epochs=...\) must be a whole number, 1 or more; found 0"),
        ({"epochs": True}, r"epochs=...\) must be a whole number"),
        ({"epochs": 1.5}, r"found 1.5"),
        ({"accumulate": True}, r"accumulate=...\) must be a whole number, 1 or more, or None; found True"),
        ({"accumulate": 0}, r"accumulate=...\) must be"),
        ({"accumulate": "4"}, r"accumulate=...\) must be"),
        ({"max_steps": 0}, r"max_steps=...\) must be a whole number, 1 or more, or None; found 0"),
        ({"checkpoint_every": 0}, r"checkpoint_every=...\) must be a whole number, 1 or more, or None; found 0"),
        ({"checkpoint_every": 2.0}, r"checkpoint_every=...\) must be"),
        ({"checkpoints": 7}, r"checkpoints=...\) takes a folder, a URL or a CheckpointPolicy; found 7 \(int\)"),
        ({"loader": None}, r"needs loader=..., or max_steps=..."),
        ({"extra": {"model": torch.nn.Linear(1, 1)}}, r"the name 'model' is taken"),
        ({"extra": [3]}, r"extra=\.\.\.\) takes parts by name.*found \[3\]"),
        ({"extra": {"average": 3}}, r"'average'.*: 3 \(int\) has no state_dict and load_state_dict"),
        ({"model": OPTIMIZER}, r"model=...\) takes a module; found an optimizer, SGD"),
        ({"model": MODEL, "optimizer": MODEL}, r"optimizer=...\) takes an optimizer; found a module, Linear"),
        ({"loader": 3}, r"loader=...\) takes what gives batches.*found 3 \(int\)"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(
    options: dict[str, Any], told: str, home: pathlib.Path
) -> None:
    with pytest.raises(InputError, match=told):
        TrainLoop(**{"loader": loader(), **options})
    assert not home.exists()
