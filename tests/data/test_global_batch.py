"""A fixed global batch: the same for any world size, in several parts where a rank cannot take its own at once."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from torch.utils.data import SequentialSampler

from sgpu.contract.errors import InputError, PositionError
from sgpu.data import DataLoader, VolumeDataset
from sgpu.data.ordering.order import order
from sgpu.data.ordering.walk import walk
from tests.data.conftest import MakeVolume, being
from tests.data.samples import Doubling, Numbers, Uneven, Wrapped

SAMPLES, WHOLE = 53, 12


def make(**options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(SAMPLES), **{"global_batch_size": WHOLE, "shuffle": True, "seed": 3, **options})


def global_batches(world: int, *, state: Any = None, steps: int = 99, **options: Any) -> tuple[list[Any], Any]:
    """Each optimizer step's samples, parts in the order of steps and ranks; and the position after them."""
    ranks = []
    for rank in range(world):
        with being(rank, world):
            loader = make(num_workers=0, **options)
            if state is not None:
                loader.load_state_dict(state)
            parts = [part.tolist() for _, part in zip(range(steps * loader.accumulate), loader, strict=False)]
            ranks.append(parts)
            after = loader.state_dict()
    steps = loader.accumulate
    turns = [[number for rank in ranks for number in rank[turn]] for turn in range(len(ranks[0]))]
    return [list(itertools.chain(*turns[at : at + steps])) for at in range(0, len(turns), steps)], after


def in_order(epoch: int = 0) -> list[int]:
    found: list[int] = order(np.arange(SAMPLES), samples=SAMPLES, seed=3, epoch=epoch).tolist()
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("most", [None, 1, 2, 4, 100])
def test_the_same_global_batches_for_any_world(world: int, most: int | None) -> None:
    options = {} if most is None else {"batch_size": most}
    found, after = global_batches(world, **options)
    assert found == [in_order()[at : at + WHOLE] for at in range(0, SAMPLES, WHOLE)]
    assert (after["epoch"], after["cursor"]) == (1, 0)
    with being(0, world):
        loader = make(num_workers=0, **options)
        assert loader.batch_size is not None
        assert loader.batch_size * world * loader.accumulate == WHOLE == loader.global_batch_size
        assert loader.batch_size <= (most or WHOLE)
        assert len(loader) == len(list(loader))


def test_another_world_in_the_middle_of_an_epoch_goes_on_with_the_same_global_batches() -> None:
    wanted = [in_order()[at : at + WHOLE] for at in range(0, SAMPLES, WHOLE)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, state = global_batches(4, steps=2, batch_size=2)
        second, state = global_batches(1, state=state, steps=1, batch_size=5)
        third, state = global_batches(3, state=state)
    assert first + second + third == wanted


def test_a_world_that_does_not_divide_it_is_refused_with_both_numbers_and_those_that_do() -> None:
    with being(0, 5), pytest.raises(InputError, match=r"global_batch_size=12 .* by 5 ranks.*\(1, 2, 3, 4, 6, 12\)"):
        make()


def test_a_rest_with_fewer_samples_than_ranks_is_refused_and_may_be_dropped() -> None:
    with being(0, 6):
        with pytest.raises(InputError, match=r"has 5 samples .53 in all, global_batch_size=12.*each of 6 ranks"):
            len(make(num_workers=0))
        assert len(make(num_workers=0, drop_last=True)) == 4


@pytest.mark.parametrize("world", [1, 2, 3])
def test_only_whole_ones_are_left_where_the_last_is_dropped(world: int) -> None:
    found, after = global_batches(world, drop_last=True, batch_size=2)
    assert found == [in_order()[at : at + WHOLE] for at in range(0, SAMPLES - WHOLE, WHOLE)]
    assert (after["epoch"], after["cursor"]) == (1, 0)
    with pytest.raises(InputError, match="drop everything: 11 samples are fewer than one global batch of 12"):
        len(DataLoader(Numbers(11), 2, num_workers=0, global_batch_size=12, drop_last=True))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be a whole number, 1 or more; found 0"),
        ({"global_batch_size": True}, "found True"), ({"global_batch_size": 8.0}, "found 8.0"),
        ({"batch_size": None}, "batch_size is the most that a rank takes at a time.*found None"),
        ({"batch_size": 0}, "found 0"), ({"evaluation": True, "shuffle": None}, "leave global_batch_size out"),
        ({"sampler": SequentialSampler(Numbers(3)), "shuffle": None}, "Numbers comes with a sampler"),
    ],
)  # fmt: skip
def test_what_it_cannot_go_with_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        make(num_workers=0, **options)


@pytest.mark.parametrize("batch_size", ["4", 4.0])
def test_a_batch_size_is_a_whole_number(batch_size: Any) -> None:
    with pytest.raises(InputError, match="batch_size must be a whole number, 1 or more, or None; found"):
        DataLoader(Numbers(3), batch_size=batch_size, num_workers=0)


def test_data_that_cannot_be_counted_have_none(make_volume: MakeVolume) -> None:
    with pytest.raises(InputError, match="Uneven comes with an iterable that cannot be counted"):
        DataLoader(Uneven(5), num_workers=0, global_batch_size=2)
    with pytest.raises(InputError, match="Doubling comes with files_at_a_time"):
        DataLoader(Doubling(VolumeDataset(make_volume(3))), num_workers=0, global_batch_size=2, files_at_a_time=1)


def test_a_world_that_was_not_known_yet_is_told() -> None:
    loader = make(num_workers=0)
    with being(0, 2), pytest.raises(InputError, match=r"12 samples to each rank.*there are 2 ranks now"):
        next(iter(loader))


def test_files_are_fetched_ahead_in_the_order_that_they_are_read(make_volume: MakeVolume) -> None:
    root = make_volume(23)
    with being(1, 2):
        volume = VolumeDataset(root, shuffle=True, seed=3)
        loader = DataLoader(Wrapped(volume), 2, num_workers=0, global_batch_size=8, drop_last=True)
        read = [part.tolist() for part in loader]
        future = loader._pipeline.future()
    assert future is not None
    ahead = [stretch for stretch, _ in zip(walk(future[1], 0, 0), read, strict=False)]
    names = [[int(volume.source.listing.path(n)[-8:-4]) for n in stretch.numbers.tolist()] for stretch in ahead]
    assert names == read
    assert [stretch.end for stretch in ahead] == [(0, 4), (0, 8), (0, 12), (0, 23)]


# ---- positions


def test_another_global_batch_is_refused_inside_an_epoch_and_told_at_its_edge() -> None:
    _, inside = global_batches(2, steps=2)
    with pytest.raises(PositionError, match=r"middle of epoch 0, with global batches of 12 .*2 ranks.*batch_size=24"):
        make(num_workers=0, global_batch_size=24).load_state_dict(inside)
    _, edge = global_batches(2)
    loader = make(num_workers=0, global_batch_size=24)
    with pytest.warns(UserWarning, match="saved with global batches of 12 samples and goes on with 24"):
        loader.load_state_dict(edge)
    assert [number for part in loader for number in part.tolist()] == in_order(1)


def test_one_that_was_not_fixed_before_must_be_the_same_inside_an_epoch() -> None:
    free = make(num_workers=0, global_batch_size=None, batch_size=6)
    iterator = iter(free)
    next(iterator), next(iterator)
    with pytest.raises(PositionError, match=r"global batches of 6 samples \(batch_size 6, 1 ranks\)"):
        make(num_workers=0).load_state_dict(free.state_dict())
    same = make(num_workers=0, global_batch_size=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same.load_state_dict(free.state_dict())
    assert [number for part in same for number in part.tolist()] == in_order()[12:]


def test_one_that_is_no_longer_fixed_goes_on_with_a_warning_of_both() -> None:
    _, inside = global_batches(2, steps=1)
    with being(0, 2):
        loader = make(num_workers=0, global_batch_size=None, batch_size=2)
        with pytest.warns(UserWarning, match="saved with global batches of 12 samples and goes on with 4"):
            loader.load_state_dict(inside)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            make(num_workers=0, global_batch_size=None, batch_size=6).load_state_dict(inside)


def test_inside_a_global_batch_only_the_same_ranks_go_on() -> None:
    loader = make(num_workers=0, batch_size=4)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    same = make(num_workers=0, batch_size=4)
    same.load_state_dict(state)
    assert [number for part in same for number in part.tolist()] == in_order()[4:]
    with pytest.raises(PositionError, match="after 4 samples of a global batch of 12; only 1 ranks that take 4"):
        make(num_workers=0, batch_size=6).load_state_dict(state)
    with being(0, 2), pytest.raises(PositionError, match="go on inside of it"):
        make(num_workers=0, batch_size=2).load_state_dict(state)
