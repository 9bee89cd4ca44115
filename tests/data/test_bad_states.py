"""States that do not belong to a loader: refused by name, or honoured by name, and never row 0 in silence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import RandomSampler

from sgpu.contract.errors import InputError, ListingChangedError, PositionError
from sgpu.data import DataLoader, VolumeDataset
from tests.data.conftest import MakeVolume, being
from tests.data.samples import Doubling, Numbers, Stateful, Uneven, Wrapped

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here

Make = Callable[[], DataLoader[Any]]


@pytest.fixture
def loaders(make_volume: MakeVolume) -> dict[str, Make]:
    root = make_volume(25)
    return {
        "volume": lambda: DataLoader(Wrapped(VolumeDataset(root, shuffle=True, seed=3)), 4, num_workers=0),
        "map": lambda: DataLoader(Numbers(25), 4, shuffle=True, seed=3, num_workers=0),
        "sampler": lambda: DataLoader(Numbers(25), 4, sampler=RandomSampler(Numbers(25)), seed=3, num_workers=0),
        "uneven": lambda: DataLoader(Uneven(25), 4, num_workers=0, seed=3),
        "stateful": lambda: DataLoader(Stateful(25), 4, num_workers=0, seed=3),
        "blocks": lambda: DataLoader(
            Doubling(VolumeDataset(root, shuffle=True, seed=3)), 4, num_workers=0, files_at_a_time=1
        ),
        "evaluation": lambda: DataLoader(Numbers(25), 4, num_workers=0, seed=3, evaluation=True),
    }


KINDS = ("volume", "map", "sampler", "uneven", "stateful", "blocks", "evaluation")


def begun(make: Make) -> tuple[dict[str, Any], list[Any]]:
    """A position after two batches, and the rest of the epoch."""
    loader = make()
    iterator = iter(loader)
    next(iterator), next(iterator)
    return loader.state_dict(), [batch.tolist() for batch in iterator]


@pytest.mark.parametrize("kind", KINDS)
def test_each_entry_that_is_lost_is_missed_by_name(kind: str, loaders: dict[str, Make]) -> None:
    state, rest = begun(loaders[kind])
    optional = {"version", "kind", "global", "merges", "dataset", "global_batch_size"}
    if kind in ("volume", "map"):
        optional |= {"rank"}
    for name in state.keys() - optional:
        loader = loaders[kind]()
        first = loader.state_dict()
        part = {key: value for key, value in state.items() if key != name}
        with pytest.raises(PositionError, match=f"not whole: it has no {name}"):
            loader.load_state_dict(part)
        assert loader.state_dict() == first, "what was refused has changed nothing"
    loader = loaders[kind]()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [-1, "7", None, 1.5, True])
def test_damaged_numbers_are_told(kind: str, bad: Any, loaders: dict[str, Make]) -> None:
    state, _ = begun(loaders[kind])
    for name in {"epoch", "cursor", "batches", "delivered", "next_worker", "start"} & state.keys():
        damaged = copy.deepcopy(state)
        damaged[name] = [bad] if isinstance(state[name], list) else bad
        loader = loaders[kind]()
        with pytest.raises(PositionError, match=f"damaged: {name} is"):
            loader.load_state_dict(damaged)
        assert len(list(loader)) == len(list(loaders[kind]())), "it still begins at the start"


@pytest.mark.parametrize("kind", ["uneven", "stateful"])
@pytest.mark.parametrize("name", ["delivered", "ended", "snapshots"])
def test_a_state_that_tells_of_other_workers_than_it_says(kind: str, name: str, loaders: dict[str, Make]) -> None:
    state, _ = begun(loaders[kind])
    with pytest.raises(PositionError, match="damaged: it was made with 0 workers and tells of"):
        loaders[kind]().load_state_dict({**state, name: [*state[name], *state[name]]})


def test_a_position_beyond_the_data_is_told(loaders: dict[str, Make]) -> None:
    state, _ = begun(loaders["map"])
    with pytest.raises(PositionError, match="position is 26 but the data set has 25"):
        loaders["map"]().load_state_dict({**state, "cursor": 26})


@pytest.mark.parametrize("kind", KINDS)
def test_another_seed_that_the_user_gave_is_refused(kind: str, loaders: dict[str, Make]) -> None:
    state, _ = begun(loaders[kind])
    with pytest.raises(PositionError, match="seed was 4 and is 3"):
        loaders[kind]().load_state_dict({**state, "seed": 4})


def test_a_seed_that_nobody_gave_gives_way_to_the_saved_one() -> None:
    """Another run has another seed of its own."""
    state, rest = begun(lambda: DataLoader(Numbers(25), 4, shuffle=True, seed=3, num_workers=0))
    loader = DataLoader(Numbers(25), 4, shuffle=True, num_workers=0)
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == rest
    assert loader.state_dict()["seed"] == 3


def test_another_listing_is_refused_for_each_kind_over_a_volume(make_volume: MakeVolume) -> None:
    root = make_volume(12)

    def made() -> list[DataLoader[Any]]:
        return [
            DataLoader(Wrapped(VolumeDataset(root)), 2, num_workers=0),
            DataLoader(Doubling(VolumeDataset(root)), 2, num_workers=0, one_to_one=False),
            DataLoader(Doubling(VolumeDataset(root)), 2, num_workers=0, files_at_a_time=1),
        ]

    states = []
    for loader in made():
        next(iter(loader))
        states.append(loader.state_dict())
    (root / "class0" / "0000.bin").unlink()
    for loader, state in zip(made(), states, strict=True):
        with pytest.raises(ListingChangedError, match=r"1 removed \(class0/0000.bin\)"):
            loader.load_state_dict(state)


@pytest.mark.parametrize("kind", ["map", "sampler", "uneven", "volume", "blocks"])
def test_another_class_of_data_is_told(kind: str, loaders: dict[str, Make]) -> None:
    state, rest = begun(loaders[kind])
    loader = loaders[kind]()
    with pytest.warns(UserWarning, match=f"over a Images and goes on over a {type(loader.dataset).__name__}"):
        loader.load_state_dict({**state, "dataset": "Images"})
    assert [batch.tolist() for batch in loader] == rest


def test_foreign_states_are_refused(loaders: dict[str, Make]) -> None:
    theirs: list[Any] = [
        {"_snapshot": {"_snapshot_step": 3}, "_steps_since_snapshot": 0},  # torchdata's
        {"epoch": 1, "sample_in_epoch": 40, "num_canonical_nodes": 2},  # MosaicML Streaming's
        [], "planned", 3,
    ]  # fmt: skip
    for state in theirs:
        for kind in KINDS:
            with pytest.raises(PositionError, match=r"expected what DataLoader.state_dict gave"):
                loaders[kind]().load_state_dict(state)


@pytest.mark.parametrize("workers", [(0, 2), (2, 1)])
def test_worker_counts_that_differ_between_ranks_are_honoured(
    workers: tuple[int, int], make_volume: MakeVolume
) -> None:
    """The order knows no workers; a stream's belong to its rank; files are dealt by what is left of them."""
    root = make_volume(12)

    def make(kind: str, count: int) -> DataLoader[Any]:
        if kind == "map":
            return DataLoader(Numbers(24), 3, shuffle=True, seed=3, num_workers=count)
        volume = VolumeDataset(root, shuffle=True, seed=3)
        if kind == "blocks":
            return DataLoader(Doubling(volume), 3, num_workers=count, files_at_a_time=1)
        return DataLoader(Doubling(volume), 3, num_workers=count, one_to_one=False)

    for kind in ("map", "blocks", "stream"):
        seen: list[int] = []
        states = []
        for rank in range(2):
            with being(rank, 2), make(kind, workers[rank]) as loader:
                iterator = iter(loader)
                seen += [*next(iterator).tolist(), *next(iterator).tolist()]
                states.append(loader.state_dict())
        for rank in range(2):
            with being(rank, 2), make(kind, workers[rank]) as loader:
                loader.load_state_dict(states[rank])
                seen += [number for batch in loader for number in batch.tolist()]
        assert len(seen) == len(set(seen)) == 24, kind


def test_a_state_of_more_ranks_than_there_are_names_both(loaders: dict[str, Make]) -> None:
    with being(3, 4):
        loader = loaders["sampler"]()
        next(iter(loader))
        state = loader.state_dict()
    with being(1, 2), pytest.raises(PositionError, match="world_size was 4 and is 2, rank was 3 and is 1"):
        loaders["sampler"]().load_state_dict(state)


def test_a_seed_must_be_whole() -> None:
    for seed in (1.5, "7", True):
        with pytest.raises(InputError, match=r"seed=...\) must be a whole number or None; found"):
            DataLoader(Numbers(3), seed=seed, num_workers=0)  # type: ignore[arg-type]
