"""What a user of torch's DataLoader expects."""

from __future__ import annotations

import logging
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from torch.utils.data import IterableDataset, SequentialSampler, Subset, TensorDataset, get_worker_info

from sgpu.contract.errors import DataError, InputError
from sgpu.data import DataLoader, VolumeDataset
from tests.data.conftest import MakeVolume, being
from tests.data.samples import Numbers, Uneven, Wrapped

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here


def test_it_is_torchs_with_the_users_attributes() -> None:
    data = Numbers(10)
    loader: DataLoader[int] = DataLoader(data, batch_size=3, num_workers=2, drop_last=True, timeout=7)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert loader.dataset is data
    assert (loader.batch_size, loader.num_workers, loader.drop_last, loader.timeout) == (3, 2, True, 7)
    assert isinstance(loader.sampler, SequentialSampler)
    assert loader.persistent_workers is False


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"batch_size": 0}, "batch_size"), ({"num_workers": -1}, "num_workers"), ({"prefetch_factor": 2}, "prefetch"),
        ({"shuffle": True, "sampler": SequentialSampler(Numbers(3))}, "mutually exclusive"),
        ({"timeout": -1}, "timeout"),
        ({"batch_sampler": [[0]], "batch_size": 2}, "batch_sampler option is mutually exclusive"),
        ({"persistent_workers": True}, "persistent_workers option needs"), ({"in_order": False}, "in_order"),
    ],
)  # fmt: skip
def test_what_torch_refuses_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        DataLoader(Numbers(3), **{"num_workers": 0, **arguments})


@pytest.mark.parametrize(
    ("argument", "wrong"),
    [
        ("prefetch_factor", 0), ("prefetch_factor", "2"), ("prefetch_factor", 1.5), ("timeout", "x"),
        ("generator", 3), ("worker_init_fn", 5), ("collate_fn", 5), ("sampler", 5), ("batch_sampler", 5),
        ("shuffle", "no"), ("pin_memory", "no"), ("persistent_workers", "no"), ("num_workers", 1.5),
    ],
)  # fmt: skip
def test_an_argument_of_a_wrong_kind_is_refused_by_name_when_the_loader_is_made(argument: str, wrong: Any) -> None:
    with pytest.raises(InputError, match=rf"^{argument} must be .*; found {wrong!r}"):
        DataLoader(Numbers(3), **{"num_workers": 2, argument: wrong})


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("volume", r"takes a data set; found 'volume'.*VolumeDataset"), (pathlib.Path("volume"), "VolumeDataset"),
        (None, r"found None \(NoneType\)"), (3, r"found 3 \(int\)"), (iter([1]), "list_iterator"),
    ],
)  # fmt: skip
def test_what_is_no_data_set_is_refused(data: object, told: str) -> None:
    with pytest.raises(InputError, match=told):
        DataLoader(data, batch_size=2, num_workers=0)


def test_shuffle_of_an_iterable_is_refused(make_volume: MakeVolume) -> None:
    with pytest.raises(ValueError, match="IterableDataset: expected unspecified shuffle"):
        DataLoader(VolumeDataset(make_volume(3)), shuffle=True)
    with pytest.raises(InputError, match="one_to_one=True needs one VolumeDataset"):
        DataLoader(Uneven(3), one_to_one=True)
    for epoch in (-1, 1.5, True):
        with pytest.raises(InputError, match="epoch must be"):
            DataLoader(Numbers(3), num_workers=0).set_epoch(epoch)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 1, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_unshuffled_batches_are_torchs(batch_size: int | None, drop_last: bool, workers: int) -> None:
    if batch_size is None and drop_last:
        return
    data = TensorDataset(torch.arange(10), torch.arange(10) * 2.0)
    arguments: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    for sampler in ({}, {"sampler": SequentialSampler(data)}):
        with DataLoader(data, num_workers=workers, **arguments, **sampler) as loader:
            wanted = list(torch.utils.data.DataLoader(data, **arguments))
            assert len(loader) == len(wanted)
            for mine, theirs in zip(loader, wanted, strict=True):
                assert type(mine) is type(theirs)
                for one, other in zip(mine, theirs, strict=True):
                    assert torch.equal(one, other)


def test_whole_batches_where_the_data_set_fetches_them() -> None:
    class Whole(Numbers):
        def __getitems__(self, numbers: list[int]) -> list[list[int]]:
            return [[number, len(numbers)] for number in numbers]

    loader: DataLoader[Any] = DataLoader(Whole(5), 2, num_workers=0, collate_fn=list)
    assert list(loader) == [[[0, 2], [1, 2]], [[2, 2], [3, 2]], [[4, 1]]]
    part: DataLoader[Any] = DataLoader(Subset(Numbers(9), [8, 1, 3]), 2, num_workers=0, collate_fn=list)
    assert list(part) == [[8, 1], [3]]


def test_workers_begin_as_the_user_said() -> None:
    class Asks(Numbers):
        tag = 0

        def __getitem__(self, number: int) -> list[int]:
            info = get_worker_info()
            assert info is not None
            return [number, info.id, info.num_workers, self.tag]

    def begin(worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.tag = worker + 10

    with DataLoader(Asks(4), 1, num_workers=2, worker_init_fn=begin, collate_fn=lambda items: items[0]) as loader:
        assert list(loader) == [[0, 0, 2, 10], [1, 1, 2, 11], [2, 0, 2, 10], [3, 1, 2, 11]]


def test_fresh_interpreters_as_workers(make_volume: MakeVolume) -> None:
    """They know their rank from nowhere but this process."""
    root = make_volume(12)
    with being(1, 2):
        dataset = Wrapped(VolumeDataset(root, shuffle=True))
        with DataLoader(dataset, 2, num_workers=1, multiprocessing_context="spawn") as loader:
            loader.set_epoch(1)
            with DataLoader(Wrapped(VolumeDataset(root, shuffle=True)), 2, num_workers=0) as same:
                same.set_epoch(1)
                assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in same]


@pytest.mark.parametrize("lives_on", [None, False])
def test_workers_live_on_unless_told_otherwise(lives_on: bool | None) -> None:
    class Pids(Numbers):
        def __getitem__(self, number: int) -> int:
            import os

            return os.getpid()

    with DataLoader(Pids(6), 2, num_workers=1, persistent_workers=lives_on) as loader:
        pids = [{int(pid) for batch in loader for pid in batch} for _ in range(2)]
    assert (pids[0] == pids[1]) == (lives_on is None)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_user_arrives_as_itself_and_the_next_pass_works(workers: int) -> None:
    class Broken(Numbers):
        def __getitem__(self, number: int) -> int:
            if number == 5 and self.size == 10:
                raise ZeroDivisionError("sample five")
            return number

    data = Broken(10)
    with DataLoader(data, 2, num_workers=workers, persistent_workers=False if workers else None) as loader:
        iterator = iter(loader)
        next(iterator), next(iterator)
        with pytest.raises(ZeroDivisionError, match="sample five"):
            next(iterator)
        with pytest.raises(Exception, match="an earlier batch of this iteration failed"):
            next(iterator)
        assert loader.state_dict()["cursor"] == 4
        assert next(iter(loader)).tolist() == [0, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it may raise in a destructor too
def test_a_dead_worker_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.callbacks", [])  # torch's signal handler may raise inside one of them

    class Dies(Numbers):
        def __getitem__(self, number: int) -> int:
            import os
            import signal

            if number == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            return number

    told = pytest.raises((RuntimeError, DataError), match=r"worker (\(pid|process)")
    with told, DataLoader(Dies(20), 2, num_workers=1) as loader:  # torch's handler may raise while it is closed
        list(loader)


def test_fewer_samples_than_ranks_and_empty_ones_are_refused() -> None:
    with being(0, 4):
        with pytest.raises(InputError, match="3 samples but there are 4 ranks"):
            next(iter(DataLoader(Numbers(3), num_workers=0)))
        with pytest.raises(InputError, match="drop everything"):
            len(DataLoader(Numbers(3), drop_last=True, num_workers=0))
    with pytest.raises(InputError, match="empty"):
        next(iter(DataLoader(Numbers(0), num_workers=0)))
    with pytest.raises(InputError, match="empty"):
        DataLoader(Numbers(0), shuffle=True, num_workers=0)
    with being(3, 4):
        assert len(DataLoader(Numbers(4), num_workers=0)) == 1


def test_the_length_of_what_nobody_can_count(make_volume: MakeVolume) -> None:
    volume = Wrapped(VolumeDataset(make_volume(3)))
    with pytest.raises(TypeError, match="does not tell how many"):
        len(DataLoader(volume, one_to_one=False, num_workers=0))
    with pytest.raises(TypeError):
        len(DataLoader(Uneven(3), num_workers=0))


def test_numbers_about_itself(make_volume: MakeVolume) -> None:
    loader: DataLoader[Any] = DataLoader(Wrapped(VolumeDataset(make_volume(10))), 4, num_workers=0)
    assert loader.stats().batches == 0
    assert len(list(loader)) == 3
    first = loader.stats()
    assert (first.batches, first.samples, first.cache_hits, first.cache_misses) == (3, 10, 0, 10)
    assert first.downloaded_bytes == 1000
    assert 0 < loader.fetch_seconds <= first.fetch_seconds_p99 <= first.fetch_seconds_total
    assert first.fetch_seconds_mean == pytest.approx(first.fetch_seconds_total / 3)
    list(loader)
    assert (loader.stats().cache_hits, loader.stats().cache_misses) == (10, 10)
    later: DataLoader[Any] = DataLoader(loader.dataset, 4, num_workers=0)
    assert (later.stats().cache_hits, later.stats().downloaded_bytes) == (0, 0)
    list(later)
    assert (later.stats().cache_hits, later.stats().cache_misses, later.stats().downloaded_bytes) == (10, 0, 0)


def test_two_volumes_in_one_data_set_are_read_again_on_resume(make_volume: MakeVolume) -> None:
    class Both(IterableDataset[str]):
        def __init__(self) -> None:
            self.parts = [VolumeDataset(make_volume(5, name="a")), VolumeDataset(make_volume(5, name="b"))]

        def __iter__(self) -> Iterator[str]:
            for part in self.parts:
                yield from part

    loader: DataLoader[str] = DataLoader(Both(), 2, num_workers=0)
    assert loader.state_dict()["kind"] == "replayed"
    assert sum(len(batch) for batch in loader) == 10


def test_workers_start_while_a_thread_logs() -> None:
    """A fork that copies a held lock would hang."""
    log, over = logging.getLogger("busy"), threading.Event()
    handler = logging.StreamHandler(open("/dev/null", "w"))  # noqa: SIM115
    log.addHandler(handler)
    log.propagate = False

    def busy() -> None:
        while not over.is_set():
            log.warning("x" * 1000)

    class Logs(Numbers):
        def __getitem__(self, number: int) -> int:
            log.warning("from a worker")
            return number

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(50):
            with DataLoader(Logs(6), 2, num_workers=2, timeout=60) as loader:
                assert len(list(loader)) == 3
    finally:
        over.set()
        thread.join()
        handler.stream.close()
        log.removeHandler(handler)


def test_numpy_samples_collate() -> None:
    class Arrays(Numbers):
        def __getitem__(self, number: int) -> Any:
            return {"x": np.full(2, number), "y": number}

    with DataLoader(Arrays(4), 2, num_workers=1) as loader:
        batch = next(iter(loader))
    assert batch["x"].tolist() == [[0, 0], [1, 1]]
