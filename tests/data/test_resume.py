"""The position law: stop anywhere, resume, and the rest is what it would have been."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from sgpu.contract.errors import DataError, ListingChangedError, PositionError
from sgpu.data import DataLoader, VolumeDataset, VolumeFiles
from tests.data.conftest import MakeVolume, being
from tests.data.samples import Doubling, Numbers, Skipping, Stateful, Uneven, Wrapped, epochs, plain

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here

Make = Callable[[int], DataLoader[Any]]


@pytest.fixture
def loaders(make_volume: MakeVolume) -> dict[str, Make]:
    """By name: a loader of 25 samples or so with a number of workers."""
    root = make_volume(25)
    return {
        "volume": lambda workers: DataLoader(
            Wrapped(VolumeDataset(root, shuffle=True, seed=3)), 4, num_workers=workers
        ),
        "paths": lambda workers: DataLoader(VolumeDataset(root, shuffle=True), 4, num_workers=workers),
        "map": lambda workers: DataLoader(Numbers(25), 4, shuffle=True, num_workers=workers),
        "files": lambda workers: DataLoader(VolumeFiles(root), 4, num_workers=workers),
        "sampler": lambda workers: DataLoader(Numbers(25), 4, sampler=RandomSampler(Numbers(25)), num_workers=workers),
        "batches": lambda workers: DataLoader(
            Numbers(25), batch_sampler=[[0, 1], [5], [7, 8, 9], [2]], num_workers=workers
        ),
        "distributed": lambda workers: DataLoader(
            Numbers(25), 4, sampler=DistributedSampler(Numbers(25), 2, 1), num_workers=workers
        ),
        "doubling": lambda workers: DataLoader(
            Doubling(VolumeDataset(root, shuffle=True)), 4, num_workers=workers, one_to_one=False
        ),
        "uneven": lambda workers: DataLoader(Uneven(25), 4, num_workers=workers),
        "stateful": lambda workers: DataLoader(Stateful(25), 4, num_workers=workers),
    }  # fmt: skip


KINDS = (
    "volume", "paths", "map", "files", "sampler", "batches", "distributed", "doubling", "uneven", "stateful",
)  # fmt: skip
ANY_WORKERS = ("volume", "paths", "map", "files", "sampler", "batches", "distributed")


def through_a_file(state: dict[str, Any]) -> Any:
    """As a checkpoint would keep it: nothing but plain values survives weights_only."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("kind", KINDS)
def test_any_stop_continues_exactly(kind: str, loaders: dict[str, Make]) -> None:
    """Without workers, at every batch of two epochs, the last of each included."""
    whole = epochs(loaders[kind](0), 3)
    flat = [batch for epoch in whole for batch in epoch]
    running = loaders[kind](0)
    seen = 0
    for epoch in range(2):
        for _ in running:
            seen += 1
            resumed = loaders[kind](0)
            resumed.load_state_dict(through_a_file(running.state_dict()))
            assert through_a_file(resumed.state_dict()) == through_a_file(running.state_dict())
            at_end = seen == sum(map(len, whole[: epoch + 1]))
            rest = epochs(resumed, 2 - epoch if at_end else 3 - epoch)
            assert [batch for part in rest for batch in part] == flat[seen:]
            assert rest[-1] == whole[2]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_that_live_on_continue_exactly_with_whole_later_epochs(kind: str, loaders: dict[str, Make]) -> None:
    with loaders[kind](2) as straight:
        whole = epochs(straight, 3)
    if kind in ANY_WORKERS:
        assert whole == epochs(loaders[kind](0), 3)
    before_end = len(whole[0]) - 2
    with loaders[kind](2) as first:
        iterator = iter(first)
        handed = [plain(next(iterator)) for _ in range(before_end)]
        state = through_a_file(first.state_dict())
    assert handed == whole[0][:before_end]
    with loaders[kind](2) as second:
        second.load_state_dict(state)
        assert epochs(second, 3) == [whole[0][before_end:], *whole[1:]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_peek_takes_nothing(kind: str, loaders: dict[str, Make]) -> None:
    whole = epochs(loaders[kind](0), 2)
    loader = loaders[kind](0)
    assert plain(next(iter(loader))) == whole[0][0]
    assert epochs(loader, 2) == whole


@pytest.mark.parametrize("kind", ["volume", "stateful", "uneven", "sampler"])
def test_a_peek_takes_nothing_from_workers_that_live_on(kind: str, loaders: dict[str, Make]) -> None:
    with loaders[kind](2) as straight:
        whole = epochs(straight, 2)
    with loaders[kind](2) as loader:
        assert plain(next(iter(loader))) == whole[0][0]
        assert epochs(loader, 1) == whole[:1]
        assert plain(next(iter(loader))) == whole[1][0]
        assert epochs(loader, 1) == whole[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_loaded_after_iter_is_honoured(kind: str, loaders: dict[str, Make]) -> None:
    whole = epochs(loaders[kind](0), 1)[0]
    first = loaders[kind](0)
    iterator = iter(first)
    next(iterator), next(iterator)
    late, running = loaders[kind](0), loaders[kind](0)
    waiting, begun = iter(late), iter(running)
    next(begun)
    for loader in (late, running):
        loader.load_state_dict(first.state_dict())
    assert [plain(batch) for batch in waiting] == whole[2:]
    assert [plain(batch) for batch in begun] == whole[2:]


@pytest.mark.parametrize("kind", ["volume", "map", "paths"])
def test_random_kills_and_resizes_train_each_sample_once(kind: str, make_volume: MakeVolume) -> None:
    root = make_volume(61)

    def make() -> DataLoader[Any]:
        if kind == "map":
            return DataLoader(Numbers(61), 3, shuffle=True, num_workers=0)
        volume = VolumeDataset(root, shuffle=True, seed=5)
        return DataLoader(volume if kind == "paths" else Wrapped(volume), 3, num_workers=0)

    for trial in range(12):
        chance = random.Random(trial)
        state: Any = None
        seen: dict[int, list[Any]] = {0: [], 1: []}
        while state is None or state["epoch"] < 2:
            left = 61 if state is None else 61 - state["cursor"]
            world = chance.choice([size for size in (1, 2, 3, 4) if size <= left])
            ranks, iterators = [make() for _ in range(world)], []
            for loader in ranks:
                if state is not None:
                    loader.load_state_dict(state)
                iterators.append(iter(loader))
            for _ in range(chance.randint(1, 9)):
                epoch = ranks[0].epoch
                for rank, iterator in enumerate(iterators):
                    with being(rank, world):
                        batch = plain(next(iterator))
                        seen[epoch] += batch
                states = [loader.state_dict() for loader in ranks]
                assert all(other == states[0] for other in states)
                state = states[0]
                if state["epoch"] != epoch:
                    break
        for epoch, found in seen.items():
            assert len(found) == len(set(found)) == 61, (trial, epoch)


def test_real_workers_resume_in_another_world(make_volume: MakeVolume) -> None:
    root = make_volume(48)

    def make(workers: int) -> DataLoader[Any]:
        return DataLoader(Wrapped(VolumeDataset(root, shuffle=True, seed=1)), 2, num_workers=workers)

    seen: list[int] = []
    state = None
    for world, workers, steps in ((2, 2, 4), (3, 1, 2), (1, 3, 100)):
        for rank in range(world):
            with being(rank, world), make(workers) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for _, batch in zip(range(steps), loader, strict=False):
                    seen += plain(batch)
                after = loader.state_dict()
        state = after
    assert sorted(seen) == list(range(48))
    assert state is not None
    assert (state["epoch"], state["cursor"]) == (1, 0)


def test_all_ranks_take_equally_many_steps(make_volume: MakeVolume) -> None:
    root = make_volume(25)
    for world, length in ((1, 7), (2, 3), (3, 2), (4, 2), (25, 1)):
        parts = []
        for rank in range(world):
            with being(rank, world):
                loader = DataLoader(Wrapped(VolumeDataset(root)), 4, num_workers=0)
                batches = [plain(batch) for batch in loader]
                assert len(batches) == len(loader) == length
                parts += [number for batch in batches for number in batch]
        assert sorted(parts) == list(range(25)), world


@pytest.mark.parametrize("kind", ["sampler", "distributed", "doubling", "uneven", "stateful"])
def test_what_needs_its_topology_says_so(kind: str, loaders: dict[str, Make]) -> None:
    loader = loaders[kind](0)
    next(iter(loader))
    state = loader.state_dict()
    assert state["global"] is False
    with being(0, 2), pytest.raises(PositionError, match="world_size was 1 and is 2"):
        loaders[kind](0).load_state_dict(state)
    if kind not in ANY_WORKERS:
        with pytest.raises(PositionError, match="workers was 0 and is 1"):
            loaders[kind](1).load_state_dict(state)


def test_states_of_other_loaders_are_refused_by_name(loaders: dict[str, Make]) -> None:
    with pytest.raises(PositionError, match="kind 'sampled'; this one is of kind 'planned'"):
        loaders["map"](0).load_state_dict(loaders["sampler"](0).state_dict())
    for bad in ({}, None, 7, {"kind": "planned"}, {"version": 99, "kind": "planned"}):
        with pytest.raises(PositionError, match="expected what"):
            loaders["map"](0).load_state_dict(bad)  # type: ignore[arg-type]
    with pytest.raises(PositionError, match="samples was 25 and is 24"):
        DataLoader(Numbers(24), shuffle=True, num_workers=0).load_state_dict(loaders["map"](0).state_dict())
    with pytest.raises(PositionError, match="shuffle was True and is False"):
        DataLoader(Numbers(25), num_workers=0).load_state_dict(loaders["map"](0).state_dict())


def test_another_seed_of_a_volume_is_refused(make_volume: MakeVolume) -> None:
    root = make_volume(5)
    state = DataLoader(VolumeDataset(root, shuffle=True, seed=1), num_workers=0).state_dict()
    with pytest.raises(PositionError, match="seed was 1 and is 2"):
        DataLoader(VolumeDataset(root, shuffle=True, seed=2), num_workers=0).load_state_dict(state)


def test_a_changed_volume_is_refused(make_volume: MakeVolume) -> None:
    root = make_volume(5)
    state = DataLoader(VolumeDataset(root), num_workers=0).state_dict()
    (root / "class0" / "new.bin").write_text("new")
    with pytest.raises(ListingChangedError, match=r"1 added \(class0/new.bin\)"):
        DataLoader(VolumeDataset(root), num_workers=0).load_state_dict(state)


def test_another_batch_size_goes_on_with_a_warning(make_volume: MakeVolume) -> None:
    root = make_volume(20)
    first = DataLoader(Wrapped(VolumeDataset(root)), 4, num_workers=0)
    (whole,) = epochs(first, 1)
    iterator = iter(first)
    next(iterator), next(iterator)
    second = DataLoader(Wrapped(VolumeDataset(root)), 5, num_workers=0)
    with pytest.warns(UserWarning, match="batch_size 4 and goes on with 5"):
        second.load_state_dict(first.state_dict())
    assert [number for batch in second for number in plain(batch)] == [
        number for batch in whole[2:] for number in batch
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("kind", "told"), [(Doubling, "Doubling.__iter__ gave more than 4 samples"), (Skipping, "Skipping.__iter__ gave 3")]
)
def test_what_is_not_one_to_one_is_caught_while_running(
    kind: type[Wrapped], told: str, workers: int, make_volume: MakeVolume
) -> None:
    with DataLoader(kind(VolumeDataset(make_volume(20))), 4, num_workers=workers) as loader:
        with pytest.raises(DataError, match=told) as caught:
            list(loader)
        assert "one_to_one=False" in str(caught.value)
        assert caught.value.dataset == kind.__name__
        with pytest.raises(DataError, match=r"__iter__ gave"):
            next(iter(loader))
