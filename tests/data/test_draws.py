from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler

from sgpu.data import DataLoader
from sgpu.data.ordering.draws import parts_of
from sgpu.data.ordering.generators import reseed
from tests.data.samples import Drawing, Uneven

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here


def draws_of(loader: DataLoader[Any], epochs: int = 1) -> list[list[list[float]]]:
    with loader:
        return [[sample for batch in loader for sample in batch] for _ in range(epochs)]


def make(workers: int, **more: Any) -> DataLoader[Any]:
    return DataLoader(Drawing(8), 2, num_workers=workers, collate_fn=list, **more)


def test_each_sample_draws_its_own_and_each_epoch_anew() -> None:
    for workers in (0, 2):
        first, second = draws_of(make(workers), 2)
        for source in range(1, 8):
            drawn = [sample[source] for sample in first + second]
            assert len(set(drawn)) == 16, (workers, source)


def test_draws_do_not_depend_on_who_fetches() -> None:
    assert draws_of(make(0), 2) == draws_of(make(2), 2) == draws_of(make(3), 2)


def test_draws_are_repeated_after_a_resume() -> None:
    whole = draws_of(make(0))[0]
    with make(2) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    with make(2) as resumed:
        resumed.load_state_dict(state)
        assert [sample for batch in resumed for sample in batch] == whole[2:]


def test_draws_under_a_sampler_of_the_user(  # the numbering is by place in the order, so a resume repeats it
) -> None:
    whole = draws_of(make(0, sampler=RandomSampler(Drawing(8))))[0]
    with make(2, sampler=RandomSampler(Drawing(8))) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
    with make(2, sampler=RandomSampler(Drawing(8))) as resumed:
        resumed.load_state_dict(state)
        assert [sample for batch in resumed for sample in batch] == whole[2:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["map", "sampler", "iterable"])
def test_this_process_generators_are_not_touched(workers: int, kind: str) -> None:
    if kind == "iterable":
        loader: DataLoader[Any] = DataLoader(Uneven(9), 2, num_workers=workers)
    else:
        loader = make(workers, **({"sampler": RandomSampler(Drawing(8))} if kind == "sampler" else {"shuffle": True}))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    wanted = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with loader:
        assert len(list(loader)) >= 3
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == wanted


def test_every_kind_of_generator_is_found_and_reseeded() -> None:
    class Holder:
        def __init__(self) -> None:
            self.parts = [
                random.Random(0),
                {"a": np.random.default_rng(0)},
                (np.random.RandomState(0), torch.Generator()),
            ]
            self.itself = self
            self.philox = np.random.Generator(np.random.Philox(3))

    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
    found = [part for part in parts_of(Holder()) if isinstance(part, kinds)]
    assert len(found) == 5

    def draw(generator: Any) -> float:
        if isinstance(generator, torch.Generator):
            return float(torch.rand((), generator=generator))
        return float(generator.random() if hasattr(generator, "random") else generator.rand())

    for generator in found:
        reseed(generator, 2**64 - 5)
        first = draw(generator)
        assert draw(generator) != first
        reseed(generator, 2**64 - 5)
        assert draw(generator) == first
