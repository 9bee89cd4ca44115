"""The loop under real workers: killed, preempted, resumed with another world size."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, IterableDataset

import sgpu
from sgpu import TrainLoop, distributed
from sgpu.contract import process
from sgpu.contract.errors import PositionError
from sgpu.contract.rundir import RunDir
from sgpu.data import DataLoader, VolumeDataset

pytestmark = pytest.mark.usefixtures("without_mlflow")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test file by its name

FILES = 26
EPOCHS = 2
STEPS = 2 * 7  # two ranks, two samples each
SECONDS = 60.0


class Numbers(IterableDataset[tuple[int, torch.Tensor]]):
    def __init__(self, files: VolumeDataset) -> None:
        self.files = files

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for path in self.files:
            number = int(pathlib.Path(path).stem)
            yield number, torch.full((4,), float(number) / FILES) + 0.1 * torch.rand(4)


def train(volume: str, notes: str, kill_at: int | None = None, stop_at: int | None = None) -> str:
    """Dropout under DDP over a volume; a line a step of what was trained. Rank 1 kills itself once in a step."""
    device = sgpu.runtime.init()
    rank = sgpu.runtime.rank()
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)).to(device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader = DataLoader(Numbers(VolumeDataset(volume, shuffle=True, seed=5)), batch_size=2, num_workers=0)
    loop = TrainLoop(model=model, optimizer=optimizer, loader=loader, epochs=EPOCHS, checkpoint_every=4)
    once = pathlib.Path(notes) / "killed"
    with (pathlib.Path(notes) / f"rank{rank}.jsonl").open("a", buffering=1) as ledger:
        for numbers, features in loop:
            loss = model(features).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if loop.step + 1 == kill_at and rank == 1 and not once.exists():
                once.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            record = [loop.step + 1, loop.epoch, numbers.tolist(), loss.item()]
            ledger.write(json.dumps(record) + "\n")
            if stop_at is not None:
                time.sleep(0.2)  # half a second ahead, where all stop together, is to be before the end
            if loop.step + 1 == stop_at:
                wait_for_go(pathlib.Path(notes))
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values())).hexdigest()


def wait_for_go(notes: pathlib.Path) -> None:
    deadline = time.monotonic() + SECONDS
    (notes / f"waiting{sgpu.runtime.rank()}").touch()
    while not (notes / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.fixture
def volume(tmp_path: pathlib.Path) -> str:
    folder = tmp_path / "volume"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number}.txt").write_text("")
    return str(folder)


def ledger(notes: pathlib.Path) -> dict[int, dict[int, list[Any]]]:
    """Rank to step to what it trained; a step that was done again has to be the same."""
    found: dict[int, dict[int, list[Any]]] = {}
    for path in notes.glob("rank*.jsonl"):
        steps = found.setdefault(int(path.stem[4:]), {})
        for line in path.read_text().splitlines():
            step, *facts = json.loads(line)
            assert steps.setdefault(step, facts) == facts, f"step {step} was done again with other samples or loss"
    return found


def lines(notes: pathlib.Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in notes.glob("rank*.jsonl"))


def folder(tmp_path: pathlib.Path, name: str) -> pathlib.Path:
    made = tmp_path / name
    made.mkdir()
    return made


@pytest.mark.slow
def test_killed_or_preempted_the_run_ends_as_an_undisturbed_one(
    volume: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.randbits", lambda _bits: 12345)  # one seed for the three runs
    run = distributed(gpus=2)(train)

    undisturbed = folder(tmp_path, "undisturbed")
    whole = run.distributed(volume, str(undisturbed))
    expected = ledger(undisturbed)
    assert set(expected[0]) == set(expected[1]) == set(range(1, STEPS + 1))
    for epoch in range(EPOCHS):
        samples = [n for rank in expected.values() for facts in rank.values() if facts[0] == epoch for n in facts[1]]
        assert sorted(samples) == list(range(FILES))

    killed = folder(tmp_path, "killed")
    assert run.distributed(volume, str(killed), kill_at=7) == whole
    assert (killed / "killed").exists()
    assert sgpu.runs()[0].status.restarts == 1
    assert ledger(killed) == expected
    assert lines(killed) > 2 * STEPS, "no step was done again: the kill came to nothing"

    preempted = folder(tmp_path, "preempted")
    handle = run.submit(volume, str(preempted), stop_at=6)
    deadline = time.monotonic() + SECONDS
    while not all((preempted / f"waiting{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline, handle.logs()
        time.sleep(0.02)
    agent = process.read_process(RunDir(pathlib.Path(handle.path)).agent)
    assert agent is not None
    os.kill(agent.pid, signal.SIGTERM)
    while not any(event["kind"] == "preempted" for event in handle.events()):
        assert time.monotonic() < deadline, handle.logs()
        time.sleep(0.02)
    (preempted / "go").touch()
    assert handle.wait(timeout_seconds=SECONDS) == "PREEMPTED"
    assert handle.checkpoints().latest() == handle.status.step < STEPS
    assert handle.resume().result(timeout_seconds=SECONDS) == whole
    assert ledger(preempted) == expected
    assert lines(preempted) == 2 * STEPS, "a step was done twice although the run had saved before it stopped"


def train_parts(volume: str, notes: str, kind: str, stop_after: int | None) -> int:
    """One epoch, left by loop.stop() after some steps."""
    sgpu.runtime.init()
    rank = sgpu.runtime.rank()
    data = torch.utils.data.TensorDataset(torch.arange(FILES))
    loader: Any
    if kind == "volume":
        loader = DataLoader(Numbers(VolumeDataset(volume, shuffle=True, seed=5)), batch_size=2, num_workers=0)
    elif kind == "map-style":
        loader = DataLoader(data, batch_size=2, shuffle=True, seed=5, num_workers=0)
    else:
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=DistributedSampler(data))
    loop = TrainLoop(model=torch.nn.Linear(1, 1), loader=loader, checkpoints=f"{notes}/checkpoints-{kind}")
    with (pathlib.Path(notes) / f"{kind}.{sgpu.runtime.world_size()}.{rank}").open("a") as trained:
        for batch in loop:
            trained.write("".join(f"{number}\n" for number in batch[0].tolist()))
            if loop.step + 1 == stop_after:
                loop.stop()
    return loop.step


def train_all_parts(volume: str, notes: str, stop_after: int | None, kinds: tuple[str, ...]) -> dict[str, int]:
    return {kind: train_parts(volume, notes, kind, stop_after) for kind in kinds}


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_world_size_trains_what_is_left_exactly_once(
    before: int, after: int, volume: str, tmp_path: pathlib.Path
) -> None:
    notes, kinds = folder(tmp_path, "notes"), ("volume", "map-style")
    first = distributed(gpus=before)(train_all_parts).distributed(volume, str(notes), 3, (*kinds, "foreign"))
    assert first == [{"volume": 3, "map-style": 3, "foreign": 3}] * before
    distributed(gpus=after)(train_all_parts).distributed(volume, str(notes), None, kinds)
    for kind in kinds:
        parts = {path: path.read_text().split() for path in notes.glob(f"{kind}.*")}
        assert len(parts) == before + after
        assert sorted(int(number) for part in parts.values() for number in part) == list(range(FILES)), kind
    with pytest.raises(PositionError, match=r"made by . ranks and there are . now; the position of DataLoader"):
        distributed(gpus=after, restarts=0)(train_all_parts).distributed(volume, str(notes), None, ("foreign",))
