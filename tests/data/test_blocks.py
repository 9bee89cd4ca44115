"""Several samples a file, none, or one of several files: exact by files and samples in them."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgpu.contract.errors import DataError, InputError, PositionError
from sgpu.data import DataLoader, VolumeDataset
from sgpu.data.ordering.rest import Rest, dealt
from tests.data.conftest import MakeVolume, being
from tests.data.samples import Numbers, Wrapped

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here


class Frames(Wrapped):
    """Number modulo four samples a file, each with a draw; counts what it decodes."""

    def __iter__(self) -> Iterator[Any]:
        for number in super().__iter__():
            for part in range(number % 4):
                yield number * 10 + part, random.random()


class Sums(Wrapped):
    """One sample of two files."""

    def __iter__(self) -> Iterator[Any]:
        held = None
        for number in super().__iter__():
            if held is None:
                held = number
            else:
                yield held * 1000 + number, random.random()
                held = None


class Impatient(Wrapped):
    """Reads the first of its files only."""

    def __iter__(self) -> Iterator[int]:
        yield next(super().__iter__())


def frames(root: pathlib.Path, workers: int = 0, **more: Any) -> DataLoader[Any]:
    return DataLoader(
        Frames(VolumeDataset(root, shuffle=True, seed=3)), 4, num_workers=workers, files_at_a_time=1, collate_fn=list,
        **more,
    )  # fmt: skip


def expected(files: int) -> list[int]:
    return sorted(number * 10 + part for number in range(files) for part in range(number % 4))


def epochs(loader: DataLoader[Any], count: int) -> list[list[Any]]:
    return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_any_stop_continues_exactly(workers: int, make_volume: MakeVolume) -> None:
    root = make_volume(15)
    with frames(root, workers) as loader:
        whole = epochs(loader, 3)
    assert all(sorted(n for batch in epoch for n, _ in batch) == expected(15) for epoch in whole)
    flat = [batch for epoch in whole for batch in epoch]
    stops = range(1, len(flat)) if not workers else (1, len(whole[0]) - 1, len(whole[0]), len(whole[0]) + 2)
    with frames(root, workers) as running:
        iterator, states = iter(running), {}
        for stop in range(1, max(stops) + 1):
            batch = next(iterator, None)
            if batch is None:
                iterator = iter(running)
                batch = next(iterator)
            assert batch == flat[stop - 1]
            states[stop] = running.state_dict()
    for stop in stops:
        with frames(root, workers) as resumed:
            resumed.load_state_dict(states[stop])
            rest = [batch for epoch in epochs(resumed, 3 - states[stop]["epoch"]) for batch in epoch]
            assert rest == flat[stop:], stop


def test_a_resume_reads_no_more_than_the_file_it_was_in(make_volume: MakeVolume) -> None:
    root = make_volume(60)
    loader = frames(root)
    iterator = iter(loader)
    for _ in range(15):
        next(iterator)
    state = loader.state_dict()
    resumed = frames(root)
    resumed.load_state_dict(state)
    handed: list[int] = []
    obtain = resumed.dataset.inside["volume"][0].source.obtain  # type: ignore[attr-defined]

    def counting(number: int, then: Sequence[int]) -> str:
        handed.append(number)
        return obtain(number, then)

    resumed.dataset.inside["volume"][0].source.obtain = counting  # type: ignore[attr-defined]
    rest = [n for batch in resumed for n, _ in batch]
    assert len(handed) <= 60 - state["places"][0][0]
    assert state["places"][0][0] >= 25
    assert len(rest) == len(expected(60)) - 60


def test_samples_of_several_files(make_volume: MakeVolume) -> None:
    root = make_volume(14)

    def make() -> DataLoader[Any]:
        volume = VolumeDataset(root, shuffle=True, seed=3)
        return DataLoader(Sums(volume), 2, num_workers=0, files_at_a_time=2, collate_fn=list)

    whole = epochs(make(), 2)
    for epoch in whole:
        files = [half for batch in epoch for n, _ in batch for half in divmod(n, 1000)]
        assert sorted(files) == list(range(14))
    loader = make()
    iterator = iter(loader)
    next(iterator), next(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert epochs(resumed, 2) == [whole[0][2:], whole[1]]


def test_random_kills_and_resizes_train_each_sample_once_with_its_own_draws(make_volume: MakeVolume) -> None:
    """Ranks run in turn in this process, each to where all of them are stopped; the last world is one rank."""
    root = make_volume(40)
    draws = dict(item for batch in frames(root) for item in batch)
    for trial in range(12):
        chance = random.Random(trial)
        states: list[dict[str, Any]] = []
        seen: list[Any] = []
        for life in range(chance.randint(2, 4)):
            world, workers = chance.randint(1, 3), chance.choice([0, 0, 0, 2]) if trial < 3 else 0
            steps, after = chance.randint(1, 3), []
            for rank in range(world):
                with being(rank, world), frames(root, workers) as loader:
                    if life:
                        loader.load_states(states)
                    for _, batch in zip(range(steps), loader, strict=False):
                        seen += batch
                        ended = loader.epoch == 1
                        if ended:
                            break
                    after.append(loader.state_dict())
            states = after
            if any(state["epoch"] for state in states):  # a rank ran out first; the others' rest is theirs
                break
        if not any(state["epoch"] for state in states):
            with frames(root) as last:
                last.load_states(states)
                seen += [item for batch in last for item in batch]
            assert sorted(number for number, _ in seen) == expected(40), trial
        assert len(seen) == len({number for number, _ in seen})
        assert all(draws[number] == drawn for number, drawn in seen)


def test_another_number_of_workers_goes_on_alone(make_volume: MakeVolume) -> None:
    root = make_volume(30)
    seen = []
    state: Any = None
    for workers, batches in ((2, 3), (0, 4), (1, 100)):
        with frames(root, workers) as loader:
            if state is not None:
                loader.load_state_dict(state)
            seen += [n for _, batch in zip(range(batches), loader, strict=False) for n, _ in batch]
            state = loader.state_dict()
    assert sorted(seen) == expected(30)
    assert state["epoch"] == 1


@settings(max_examples=200, deadline=None)
@given(
    blocks=st.integers(1, 60),
    lives=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 99)), min_size=1, max_size=4),
)
def test_what_is_left_and_what_is_done_are_all(blocks: int, lives: list[tuple[int, int, int]]) -> None:
    """Blocks hold three samples each; workers stop anywhere."""
    rests, done = [Rest(start=0, stride=1, blocks=blocks)], []
    for world, workers, seed in lives:
        chance, after = random.Random(seed), []
        for rank in range(world):
            rest = dealt(rests, rank=rank, world=world)
            places: list[tuple[int, int] | None] = []
            for worker in range(workers):
                mine = range(worker, rest.items, workers)
                turn = chance.randint(0, min(len(mine), 4))
                for number in mine[:turn]:
                    block, before = rest.item(number)
                    done += [(block, sample) for sample in range(before, 3)]
                if turn == len(mine):
                    places.append(None)
                    continue
                block, before = rest.item(mine[turn])
                inside = chance.randint(before, 3)
                done += [(block, sample) for sample in range(before, inside)]
                places.append((turn, inside))
            after.append(rest.after(places))
        rests = after
    left = [
        (block, sample)
        for rest in rests
        for block, before in map(rest.item, range(rest.items))
        for sample in range(before, 3)
    ]
    assert sorted(done + left) == [(block, sample) for block in range(blocks) for sample in range(3)]


def test_what_cannot_be_exact_is_refused(make_volume: MakeVolume) -> None:
    root = make_volume(6)
    volume = VolumeDataset(root)
    with pytest.raises(InputError, match="files_at_a_time must be a whole number, 1 or more; found 0"):
        DataLoader(Frames(volume), num_workers=0, files_at_a_time=0)
    with pytest.raises(InputError, match=r"an iterable around one VolumeDataset.*Numbers holds 0 volume"):
        DataLoader(Numbers(4), num_workers=0, files_at_a_time=1)
    with pytest.raises(InputError, match="does not give one sample a file"):
        DataLoader(Frames(volume), num_workers=0, files_at_a_time=1, evaluation=True)
    with pytest.raises(DataError, match="ended having read 1 of 2 files"):
        list(DataLoader(Impatient(volume), num_workers=0, files_at_a_time=2))
    state = frames(root).state_dict()
    with being(0, 2), pytest.raises(PositionError, match=r"world_size was 1 and is 2.*load_states"):
        frames(root).load_state_dict(state)
    with pytest.raises(PositionError, match="not whole: it has no head"):
        frames(root).load_state_dict({name: value for name, value in state.items() if name != "head"})
    with pytest.raises(PositionError, match="files_at_a_time was 1 and is 2"):
        DataLoader(Frames(volume), 4, num_workers=0, files_at_a_time=2, seed=3).load_state_dict(
            {**state, "shuffle": False}
        )
    with pytest.raises(DataError, match="expected one state of each rank of one world"):
        frames(root).load_states([state, state])
    with pytest.warns(UserWarning, match="batch_size 5 and goes on with 4"):
        frames(root).load_state_dict({**state, "batch_size": 5})
