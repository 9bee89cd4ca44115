"""Evaluation: every sample once over all ranks, and the same number for any world size."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import SequentialSampler

from sgpu.contract.errors import InputError, PositionError
from sgpu.data import DataLoader, VolumeDataset, gather_batches
from sgpu.data.ordering.walk import WalkPlan, walk
from tests.data.conftest import MakeVolume, being
from tests.data.samples import Doubling, Numbers, Uneven, Wrapped

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # few CPUs are no fault here

RANK = """
import json, sys
import torch, torch.distributed as dist
from sgpu.data import DataLoader, gather_batches
rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
if world > 1:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
torch.manual_seed(0)
torch.set_num_threads(1)
model, data = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1)), torch.randn(29, 7)
loader = DataLoader(torch.utils.data.TensorDataset(data), 4, num_workers=0, evaluation=True)
with torch.no_grad():
    sums = [(float(model(batch).sum()), len(batch)) for (batch,) in loader]
told = gather_batches(sums)
print(json.dumps([len(sums), sum(count for _, count in told), (sum(s for s, _ in told) / 29).hex()]))
if world > 1:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("samples", [1, 3, 4, 29])
def test_each_sample_once_whatever_the_world(samples: int, workers: int, make_volume: MakeVolume) -> None:
    root = make_volume(samples)
    worlds = {1, 3} if workers else {1, 2, 3, 4}
    for world in worlds:
        by_rank = []
        for rank in range(world):
            with being(rank, world):
                with DataLoader(Wrapped(VolumeDataset(root)), 4, num_workers=workers, evaluation=True) as loader:
                    first = [batch.tolist() for batch in loader]
                    assert len(loader) == len(first)
                    assert [batch.tolist() for batch in loader] == first, "again in the next pass"
                    by_rank.append(first)
        turns = max(map(len, by_rank))
        whole = [batches[turn] for turn in range(turns) for batches in by_rank if turn < len(batches)]
        listed = sorted(range(samples), key=lambda number: (number % 3, number))  # by the folders of the volume
        assert whole == [listed[start : start + 4] for start in range(0, samples, 4)]
        assert turns - min(map(len, by_rank)) <= 1


def test_the_metric_is_equal_to_the_bit_for_any_world(tmp_path: pathlib.Path) -> None:
    told = {}
    for world in (1, 3):
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(rank), str(world), str(tmp_path / f"store{world}")],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world)},
            )
            for rank in range(world)
        ]  # fmt: skip
        answers = []
        for process in ranks:
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
            answers.append(json.loads(out.strip().splitlines()[-1]))
        assert sum(batches for batches, *_ in answers) == 8
        told[world] = {(count, metric) for _, count, metric in answers}
    assert told[1] == told[3]
    assert len(told[1]) == 1


def test_the_walk_ahead_sees_what_is_read() -> None:
    plan = WalkPlan(samples=11, batch=4, world=2, rank=1, seed=0, shuffle=False, drop_last=False, dealt=True)
    with being(1, 2):
        batches = [b.tolist() for b in DataLoader(Numbers(11), 4, num_workers=0, evaluation=True)]
    seen = [stretch.numbers.tolist() for stretch, _ in zip(walk(plan, 0, 0), batches, strict=False)]
    assert seen == batches == [[4, 5, 6, 7]]
    none = WalkPlan(samples=3, batch=4, world=2, rank=1, seed=0, shuffle=False, drop_last=False, dealt=True)
    assert list(walk(none, 0, 0)) == []


def test_its_position_belongs_to_its_world() -> None:
    loader = DataLoader(Numbers(10), 2, num_workers=0, evaluation=True)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0, 1]
    state = loader.state_dict()
    again = DataLoader(Numbers(10), 2, num_workers=0, evaluation=True)
    again.load_state_dict(state)
    assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6, 7], [8, 9]]
    assert state["global"] is False
    with being(0, 2), pytest.raises(PositionError, match="world_size was 1 and is 2"):
        DataLoader(Numbers(10), 2, num_workers=0, evaluation=True).load_state_dict(state)
    with pytest.raises(PositionError, match="kind 'evaluation'; this one is of kind 'planned'"):
        DataLoader(Numbers(10), 2, num_workers=0).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"dataset": Numbers(4), "drop_last": True}, "drop_last=True would leave some out"),
        ({"dataset": Numbers(4), "sampler": SequentialSampler(Numbers(4))}, "Numbers has a sampler of its own"),
        ({"dataset": Uneven(4)}, "Uneven cannot be counted"),
    ],
)
def test_what_cannot_be_evaluated_exactly_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        DataLoader(**arguments, batch_size=2, num_workers=0, evaluation=True)


def test_several_samples_a_file_are_refused(make_volume: MakeVolume) -> None:
    with pytest.raises(InputError, match="Doubling does not give one sample a file"):
        DataLoader(Doubling(VolumeDataset(make_volume(3))), num_workers=0, one_to_one=False, evaluation=True)


def test_alone_there_is_nothing_to_gather() -> None:
    assert gather_batches(iter([3, 1])) == [3, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_validation_pass_in_between_moves_nothing(workers: int, make_volume: MakeVolume) -> None:
    """Also over the same data set object: neither its epoch nor anybody's generators."""
    volume = VolumeDataset(make_volume(20), shuffle=True, seed=3)

    def train(validating: bool) -> list[Any]:
        volume.set_epoch(0)
        for generator in (random.seed, np.random.seed, torch.manual_seed):
            generator(5)
        seen: list[Any] = []
        with (
            DataLoader(Wrapped(volume), 4, num_workers=workers) as loader,
            DataLoader(Wrapped(volume), 8, num_workers=workers, evaluation=True) as validation,
        ):
            for _ in range(3):
                for number, batch in enumerate(loader):
                    if validating and number % 2 == 0:
                        assert sorted(n for part in validation for n in part.tolist()) == list(range(20))
                    draws = random.random(), float(np.random.rand()), float(torch.rand(()))
                    seen.append((loader.epoch, batch.tolist(), draws, loader.state_dict()))
        return seen

    assert train(True) == train(False)


def test_two_streams_over_one_data_set_do_not_disturb_each_other(make_volume: MakeVolume) -> None:
    volume = VolumeDataset(make_volume(9), shuffle=True, seed=3)
    alone = [b.tolist() for b in DataLoader(Doubling(volume), 3, num_workers=0, one_to_one=False)]
    volume.set_epoch(0)
    seen = []
    for batch in DataLoader(Doubling(volume), 3, num_workers=0, one_to_one=False):
        seen.append(batch.tolist())
        if len(seen) == 2:
            other = DataLoader(Doubling(volume), 3, num_workers=0, one_to_one=False)
            assert len(list(other)) == 6
    assert seen == alone
