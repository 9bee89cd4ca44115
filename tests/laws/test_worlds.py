"""Another world size in the middle of an epoch and at its edge: real ranks, killed, and begun again as others."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset, DistributedSampler, IterableDataset

from sgpu import CheckpointPolicy
from sgpu.data import DataLoader, VolumeDataset
from sgpu.data.ordering.order import order
from sgpu.testing.laws.fresh import FAILED, FreshProcesses
from sgpu.testing.laws.worker import become_worker, make_run
from sgpu.training import TrainLoop, seed_everything

cloudpickle.register_pickle_by_value(sys.modules[__name__])
COUNT = 23


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> int:
        return number


class Stream(IterableDataset[int]):
    """Nobody knows its length; each rank has its own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank() if dist.is_initialized() else 0, 8, 2))


class Frames(IterableDataset[int]):
    """Three samples a file."""

    def __init__(self, files: VolumeDataset) -> None:
        self.files = files

    def __iter__(self) -> Iterator[int]:
        for path in self.files:
            yield from range(3 * int(pathlib.Path(path).stem), 3 * int(pathlib.Path(path).stem) + 3)


def loader_of(kind: str, rank: int, world: int, folder: pathlib.Path, workers: int = 0) -> Any:
    if kind == "frames":
        files = VolumeDataset(folder / "volume", shuffle=True, seed=3)
        return DataLoader(Frames(files), 2, num_workers=0, files_at_a_time=1)
    if kind == "map-style":
        return DataLoader(Numbers(), 2, shuffle=True, seed=5, num_workers=workers)
    if kind == "dropping":
        return DataLoader(Numbers(), 3, shuffle=True, seed=5, num_workers=0, drop_last=True)
    if kind == "global batch":
        return DataLoader(Numbers(), 2, shuffle=True, seed=5, num_workers=workers, global_batch_size=6)
    if kind == "sampler":
        sampler = DistributedSampler(Numbers(), num_replicas=world, rank=rank)
        return DataLoader(Numbers(), 4, sampler=sampler, num_workers=0)
    return DataLoader(Stream(), 2, num_workers=0)


@dataclass(frozen=True, kw_only=True)
class Life:
    """One start of the job: killed in the step after `until`; None: it may end."""

    number: int
    world: int
    until: int | None = None
    workers: int = 0


def train(folder: pathlib.Path, kind: str, life: Life, epochs: int, rank: int) -> None:
    torch.set_num_threads(1)
    become_worker(folder / f"run{life.number}", rank=rank, world_size=life.world)
    if life.world > 1:
        meet = f"file://{folder}/meet{life.number}"
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=life.world)
    seed_everything(100 * life.number + rank)
    output = os.open(folder / f"ledger{life.number}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    model = torch.nn.Linear(1, 1)
    loop = TrainLoop(
        model=model, loader=loader_of(kind, rank, life.world, folder, life.workers), epochs=epochs,
        checkpoints=CheckpointPolicy(str(folder / "checkpoints"), every_steps=1, keep_last=3),
    )  # fmt: skip
    for batch in loop:
        if loop.step == life.until:
            loop._checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        os.write(output, json.dumps([loop.step, loop.epoch, batch.tolist(), draws]).encode() + b"\n")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[FreshProcesses]]:
    started = [FreshProcesses() for _ in range(3)]
    yield started
    for host in started:
        host.close()


@dataclass(frozen=True, kw_only=True)
class Lives:
    """Starts the job's lives, and reads what they trained."""

    hosts: list[FreshProcesses]
    folder: pathlib.Path
    kind: str
    epochs: int = 2

    def live(self, life: Life) -> list[int]:
        """Exit codes of the ranks."""
        make_run(self.folder / f"run{life.number}", world_size=life.world, seed=9)
        with ThreadPoolExecutor(life.world) as pool:
            return list(pool.map(functools.partial(self._rank, life), range(life.world)))

    def _rank(self, life: Life, rank: int) -> int:
        job = functools.partial(train, self.folder, self.kind, life, self.epochs, rank)
        return self.hosts[rank].run(job, log=self.folder / f"log{life.number}.{rank}")

    def log(self, life: Life) -> str:
        return "\n".join(self.folder.joinpath(f"log{life.number}.{r}").read_text()[-3000:] for r in range(life.world))

    def records(self, life: Life) -> list[list[list[Any]]]:
        """By rank: step, epoch, samples, draws."""
        files = [self.folder / f"ledger{life.number}.{rank}" for rank in range(life.world)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    def trained(self, *lives: Life) -> dict[int, list[int]]:
        """Samples by epoch, sorted."""
        found: dict[int, list[int]] = {}
        for life in lives:
            for records in self.records(life):
                for _, epoch, samples, _ in records:
                    found.setdefault(epoch, []).extend(samples)
        return {epoch: sorted(samples) for epoch, samples in found.items()}


def test_other_worlds_train_the_rest_once_and_end_with_the_epochs(
    hosts: list[FreshProcesses], tmp_path: pathlib.Path
) -> None:
    run = Lives(hosts=hosts, folder=tmp_path, kind="map-style")
    first, second = Life(number=1, world=2, until=3), Life(number=2, world=3, until=4)
    third, last = Life(number=3, world=1, until=11), Life(number=4, world=2)
    for life in (first, second, third):
        assert run.live(life) == [-signal.SIGKILL] * life.world, run.log(life)
    assert run.live(last) == [0, 0], run.log(last)
    assert run.trained(first, second, third, last) == {0: list(range(COUNT)), 1: list(range(COUNT))}
    steps = [record[0] for life in (first, second, third, last) for record in run.records(life)[0]]
    assert steps == list(range(len(steps)))
    assert {record[1] for record in run.records(third)[0]} == {0, 1}, "the edge was passed by a world of one"


def test_ranks_of_another_world_draw_by_seed_step_and_rank(hosts: list[FreshProcesses], tmp_path: pathlib.Path) -> None:
    draws = []
    for attempt in ("one", "two"):
        folder = tmp_path / attempt
        folder.mkdir()
        run = Lives(hosts=hosts, folder=folder, kind="map-style")
        first = Life(number=1 if attempt == "one" else 5, world=1, until=2)
        second = Life(number=2 if attempt == "one" else 7, world=2, until=4)
        assert run.live(first) == [-signal.SIGKILL], run.log(first)
        assert run.live(second) == [-signal.SIGKILL] * 2, run.log(second)
        draws.append([[record[3] for record in records] for records in run.records(second)])
    assert draws[0] == draws[1], "however the new ranks were seeded when they started"
    flat = [number for records in draws[0] for record in records for number in record]
    assert len(flat) == len(set(flat)) == 12


def test_what_another_world_would_drop_is_an_ended_epoch(hosts: list[FreshProcesses], tmp_path: pathlib.Path) -> None:
    """23 samples, 3 a rank and step: a world of one leaves 5 after six steps, fewer than two ranks would take."""
    run = Lives(hosts=hosts, folder=tmp_path, kind="dropping")
    first, last = Life(number=1, world=1, until=6), Life(number=2, world=2)
    assert run.live(first) == [-signal.SIGKILL], run.log(first)
    assert run.live(last) == [0, 0], run.log(last)
    trained = run.trained(first, last)
    assert {epoch: len(samples) for epoch, samples in trained.items()} == {0: 18, 1: 18}
    assert [record[0] for record in run.records(last)[1]] == [6, 7, 8]


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_what_belongs_to_its_world_goes_on_at_an_edge_and_is_refused_elsewhere(
    kind: str, hosts: list[FreshProcesses], tmp_path: pathlib.Path
) -> None:
    run = Lives(hosts=hosts, folder=tmp_path, kind=kind)
    edge = 6 if kind == "sampler" else 2
    first, last = Life(number=1, world=1, until=edge), Life(number=2, world=2)
    assert run.live(first) == [-signal.SIGKILL], run.log(first)
    assert run.live(last) == [0, 0], run.log(last)
    assert {record[1] for records in run.records(last) for record in records} == {1}
    (tmp_path / "again").mkdir()
    run = Lives(hosts=hosts, folder=tmp_path / "again", kind=kind)
    first = Life(number=1, world=1, until=1)
    assert run.live(first) == [-signal.SIGKILL], run.log(first)
    assert run.live(last) == [FAILED, FAILED], run.log(last)
    assert "made by 1 ranks and there are 2 now" in run.log(last)
    assert "keep checkpoints of epochs' edges" in run.log(last)


def test_files_of_several_samples_go_on_in_other_worlds(hosts: list[FreshProcesses], tmp_path: pathlib.Path) -> None:
    (tmp_path / "volume").mkdir()
    for number in range(12):
        (tmp_path / "volume" / f"{number:02}").write_text("")
    run = Lives(hosts=hosts, folder=tmp_path, kind="frames")
    first, second = Life(number=1, world=2, until=2), Life(number=2, world=3, until=4)
    last = Life(number=3, world=1)
    for life in (first, second):
        assert run.live(life) == [-signal.SIGKILL] * life.world, run.log(life)
    assert run.live(last) == [0], run.log(last)
    assert run.trained(first, second, last) == {0: list(range(36)), 1: list(range(36))}


def test_a_global_batch_is_a_step_of_any_world(hosts: list[FreshProcesses], tmp_path: pathlib.Path) -> None:
    """6 samples a step: 3 batches of 2 on one rank, 1 of 2 on each of 3, 3 of 1 on each of 2 (2 for the last 5)."""
    run = Lives(hosts=hosts, folder=tmp_path, kind="global batch")
    first, second = Life(number=1, world=1, until=1), Life(number=2, world=3, until=3)
    last = Life(number=3, world=2)
    for life in (first, second):
        assert run.live(life) == [-signal.SIGKILL] * life.world, run.log(life)
    assert run.live(last) == [0, 0], run.log(last)
    trained: dict[int, list[int]] = {}
    for life in (first, second, last):
        parts = run.records(life)
        for turn in range(len(parts[0])):
            step = parts[0][turn][0]
            trained.setdefault(step, []).extend(number for rank in parts for number in rank[turn][2])
    assert [len(records) for records in (run.records(first)[0], run.records(second)[0])] == [3, 2]
    assert len(run.records(last)[0]) == 2 + 3 * 3 + 2
    for epoch in range(2):
        whole = order(np.arange(COUNT), samples=COUNT, seed=5, epoch=epoch).tolist()
        found = [trained[4 * epoch + step] for step in range(4)]
        assert found == [whole[at : at + 6] for at in range(0, COUNT, 6)]


def test_what_is_left_for_too_many_ranks_is_gone_on_with_from_an_older_checkpoint(
    hosts: list[FreshProcesses], tmp_path: pathlib.Path
) -> None:
    """23 samples, 2 a step on one rank: 1 is left after step 11. After step 10 three ranks can share what is left."""
    run = Lives(hosts=hosts, folder=tmp_path, kind="map-style")
    first, last = Life(number=1, world=1, until=11), Life(number=2, world=3)
    assert run.live(first) == [-signal.SIGKILL], run.log(first)
    assert run.live(last) == [0] * 3, run.log(last)
    told = "step 10 is gone on from instead of step 11: 1 samples of the epoch were left there for 3 ranks"
    assert told in run.log(last)
    again = {record[0] for record in run.records(last)[0]}
    kept = [number for step, _, samples, _ in run.records(first)[0] if step not in again for number in samples]
    rest = [number for records in run.records(last) for _, epoch, part, _ in records if epoch == 0 for number in part]
    assert sorted([*kept, *rest]) == list(range(COUNT))
    assert run.trained(last)[1] == list(range(COUNT))


def test_where_there_is_no_older_one_it_is_refused_with_both_numbers(
    hosts: list[FreshProcesses], tmp_path: pathlib.Path
) -> None:
    run = Lives(hosts=hosts, folder=tmp_path, kind="map-style")
    first, last = Life(number=1, world=1, until=11), Life(number=2, world=3)
    assert run.live(first) == [-signal.SIGKILL], run.log(first)
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        if not folder.name.startswith("step-00000011"):
            shutil.rmtree(folder)
    assert run.live(last) == [FAILED] * 3, run.log(last)
    assert "1 samples of this epoch are left for 3 ranks" in run.log(last)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(4))
def test_random_histories_of_real_ranks_and_workers(
    number: int, hosts: list[FreshProcesses], tmp_path: pathlib.Path
) -> None:
    """As tests/laws/test_schedules.py has them by the hundred, with processes: two to four kills."""
    chance = random.Random(number)
    run = Lives(hosts=hosts, folder=tmp_path, kind=chance.choice(["map-style", "global batch"]))
    lives, step, last = [], 0, 2 * 4 if run.kind == "global batch" else 8
    for kill in range(1, chance.randint(2, 4) + 1):
        step += chance.randint(1, 2)
        if step < last - 2:
            lives.append(Life(number=kill, world=chance.randint(1, 3), workers=chance.randint(0, 2), until=step))
    lives.append(Life(number=9, world=chance.randint(1, 3), workers=chance.randint(0, 2)))
    for life in lives:
        wanted = [0 if life.until is None else -signal.SIGKILL] * life.world
        assert run.live(life) == wanted, f"{lives}: {run.log(life)}"
    assert run.trained(*lives) == {0: list(range(COUNT)), 1: list(range(COUNT))}, lives
    assert len({life.world for life in lives}) > 1 or len({life.workers for life in lives}) > 1
