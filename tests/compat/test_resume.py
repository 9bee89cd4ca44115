"""The published ways to resume data by hand, each stopped in the middle and gone on with, on two workers.

Three calls of one function: undisturbed; stopped after some batches; gone on with from what that one saved. What the
second and third trained together has to be what the first trained, sample by sample and draw by draw.
"""

from __future__ import annotations

import itertools
import pathlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from sgpu.compat import distributed
from sgpu.compat import runtime as rt
from sgpu.compat.data import UCVolumeReader, UCVolumeWriter

pytestmark = pytest.mark.usefixtures("without_mlflow")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file by its name

EPOCHS = 3
SAMPLES = 22
SHARDS = 7

Trained = list[tuple[Any, ...]]


class Stop(Exception):
    """The place where the second call ends."""


class Saved:
    """What one rank keeps in a checkpoint, under keys that hold its rank (DCP keeps one value a key)."""

    def __init__(self, folder: str, stop_after: int | None) -> None:
        self.folder, self.stop_after, self.batches = pathlib.Path(folder), stop_after, 0

    def load(self, template: dict[str, Any]) -> dict[str, Any] | None:
        if not (self.folder / ".metadata").is_file():
            return None
        state = {f"{key}.rank{rt.get_global_rank()}": value for key, value in template.items()}
        dcp.load(state, storage_reader=UCVolumeReader(self.folder))
        return {key.rsplit(".rank", 1)[0]: value for key, value in state.items()}

    def batch_done(self, state: Callable[[], dict[str, Any]]) -> None:
        """Saves and leaves once enough batches were trained."""
        self.batches += 1
        if self.batches == self.stop_after:
            named = {f"{key}.rank{rt.get_global_rank()}": value for key, value in state().items()}
            dcp.save(named, storage_writer=UCVolumeWriter(self.folder))
            raise Stop


def sampler_skips_ahead(saved: Saved, trained: Trained) -> None:
    """Epoch and batch are saved; the same order is made again, and the batches that were trained are passed over."""
    data = TensorDataset(torch.arange(SAMPLES))
    sampler = DistributedSampler(data, num_replicas=rt.get_world_size(), rank=rt.get_global_rank(), seed=5)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    at = saved.load({"epoch": 0, "batch": 0}) or {"epoch": 0, "batch": 0}
    for epoch in range(at["epoch"], EPOCHS):
        sampler.set_epoch(epoch)
        done = at["batch"] if epoch == at["epoch"] else 0
        for batch, (numbers,) in enumerate(itertools.islice(loader, done, None), start=done + 1):
            trained.append((epoch, tuple(numbers.tolist())))
            saved.batch_done(lambda epoch=epoch, batch=batch: {"epoch": epoch, "batch": batch})


def epochs_edge(saved: Saved, trained: Trained) -> None:
    """Only whole epochs count: the number of finished ones is saved."""
    data = TensorDataset(torch.arange(SAMPLES))
    sampler = DistributedSampler(data, num_replicas=rt.get_world_size(), rank=rt.get_global_rank(), seed=5)
    loader = DataLoader(data, batch_size=3, sampler=sampler)
    finished = (saved.load({"finished": 0}) or {"finished": 0})["finished"]
    for epoch in range(finished, EPOCHS):
        sampler.set_epoch(epoch)
        trained.extend((epoch, tuple(numbers.tolist())) for (numbers,) in loader)
        saved.batch_done(lambda epoch=epoch: {"finished": epoch + 1})


class ShardData:
    """A user's data set over shards of five samples, with the two methods."""

    def __init__(self, shards: list[int]) -> None:
        self.shards, self.at, self.inside = shards, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < len(self.shards):
            while self.inside < 5:
                self.inside += 1
                yield self.shards[self.at] * 5 + self.inside - 1
            self.at, self.inside = self.at + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "inside": self.inside}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.inside = state["at"], state["inside"]


def shard_data_set_with_a_state(saved: Saved, trained: Trained) -> None:
    data = ShardData(list(range(rt.get_global_rank(), SHARDS, rt.get_world_size())))
    state = saved.load({"at": 0, "inside": 0})
    if state is not None:
        data.load_state_dict(state)
    for sample in data:
        trained.append((sample,))
        saved.batch_done(data.state_dict)


def only_the_remaining_shards(saved: Saved, trained: Trained) -> None:
    """Names of finished shards are saved; the list of shards is filtered by them."""
    mine = range(rt.get_global_rank(), SHARDS, rt.get_world_size())
    done = list((saved.load({"done": []}) or {"done": []})["done"])
    for shard in [shard for shard in mine if shard not in done]:
        trained.append((shard,))
        done.append(shard)
        saved.batch_done(lambda: {"done": done})


def draws_go_on(saved: Saved, trained: Trained) -> None:
    """Python's, NumPy's and torch's generators, each rank its own."""
    for seed, draw in ((random.seed, 1), (np.random.seed, 2), (torch.manual_seed, 3)):
        seed(10 * draw + rt.get_global_rank())
    state = saved.load({"step": 0, "python": None, "numpy": None, "torch": torch.get_rng_state()})
    if state is not None:
        random.setstate(state["python"])
        keys = state["numpy"]
        np.random.set_state((keys[0], np.array(keys[1], dtype=np.uint32), *keys[2:]))
        torch.set_rng_state(state["torch"])

    def present(step: int) -> dict[str, Any]:
        name, keys, *rest = np.random.get_state()
        return {
            "step": step, "python": random.getstate(), "numpy": (name, keys.tolist(), *rest),
            "torch": torch.get_rng_state(),
        }  # fmt: skip

    for step in range(state["step"] if state else 0, 12):
        trained.append((step, random.random(), float(np.random.rand()), float(torch.rand(()))))
        saved.batch_done(lambda step=step: present(step + 1))


WAYS = (sampler_skips_ahead, epochs_edge, shard_data_set_with_a_state, only_the_remaining_shards, draws_go_on)
STOPS = {
    "sampler_skips_ahead": 6, "epochs_edge": 2, "shard_data_set_with_a_state": 7, "only_the_remaining_shards": 2,
    "draws_go_on": 5,
}  # fmt: skip


def train(root: str, stop: bool) -> dict[str, Trained]:
    rt.init()
    found: dict[str, Trained] = {}
    for way in WAYS:
        name = way.__name__
        found[name] = []
        saved = Saved(f"{root}/{name}", STOPS[name] if stop else None)
        try:
            way(saved, found[name])
        except Stop:
            found[name].append(("stopped",))
    return found


def test_each_way_trains_what_an_undisturbed_run_trains(tmp_path: pathlib.Path) -> None:
    run = distributed(gpus=2)(train)
    whole = run.distributed(str(tmp_path / "undisturbed"), False)
    before = run.distributed(str(tmp_path / "volume"), True)
    after = run.distributed(str(tmp_path / "volume"), False)
    for rank in range(2):
        for name in STOPS:
            first, rest = before[rank][name], after[rank][name]
            assert first[-1] == ("stopped",), name
            assert rest, name
            assert first[:-1] + rest == whole[rank][name], (rank, name)
    draws = [whole[rank]["draws_go_on"] for rank in range(2)]
    assert draws[0] != draws[1]
    shards = sorted(sample for rank in whole for (sample,) in rank["shard_data_set_with_a_state"])
    assert shards == list(range(SHARDS * 5))
