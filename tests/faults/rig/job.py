"""What every cell trains: two ranks, three epochs of four steps over a volume, and a ledger of all that was done."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import sgpu
from sgpu.contract import failpoint
from sgpu.data import DataLoader, VolumeDataset

FILES, EPOCHS, BATCH = 16, 3, 2


def steps(world: int = 2) -> int:
    return EPOCHS * FILES // (BATCH * world)


class Numbers(IterableDataset[tuple[int, torch.Tensor]]):
    """Each file's number, and features that are noisy by random draws."""

    def __init__(self, files: Any) -> None:
        self.files = files

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        for path in self.files:
            number = int(pathlib.Path(path).read_bytes()[:4])
            yield number, torch.full((4,), number / FILES) + 0.1 * torch.rand(4)


def make_volume(folder: pathlib.Path) -> None:
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number}.txt").write_bytes(b"%04d" % number + b"." * 4000)


def train(volume: str, notes: str, max_steps: int | None = None) -> dict[str, Any]:
    """Dropout, AdamW and DDP. Gives a hash of all that was trained, and the steps."""
    device = sgpu.runtime.init()
    rank = sgpu.runtime.rank()
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)).to(device)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader: Any = DataLoader(Numbers(VolumeDataset(volume, shuffle=True, seed=5)), batch_size=BATCH, num_workers=0)
    loop = sgpu.TrainLoop(
        model=model, optimizer=optimizer, loader=loader, epochs=EPOCHS, max_steps=max_steps, checkpoint_every=2
    )
    with (pathlib.Path(notes) / f"rank{rank}.jsonl").open("a", buffering=1) as ledger:
        for numbers, features in loop:
            epoch = loop.epoch
            failpoint.failpoint("job.before_all_reduce", rank, step=loop.step + 1)
            loss = model(features).square().mean()
            optimizer.zero_grad()
            loss.backward()
            failpoint.failpoint("job.before_step", rank, step=loop.step + 1)
            optimizer.step()
            loop.log(loss=loss.item())
            ledger.write(json.dumps([loop.step + 1, epoch, numbers.tolist(), loss.item()]) + "\n")
    return {"digest": digest(model, optimizer), "steps": loop.step}


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.detach().numpy().tobytes())
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in sorted(state.items()):
            found.update(f"{key}/{name}".encode() + value.numpy().tobytes())
    return found.hexdigest()


def read_ledger(notes: pathlib.Path) -> dict[int, dict[int, list[Any]]]:
    """Rank to step to what it trained: epoch, samples, loss. A step that was done again has to be the same."""
    found: dict[int, dict[int, list[Any]]] = {}
    for path in sorted(notes.glob("rank*.jsonl")):
        done = found.setdefault(int(path.stem[4:]), {})
        for line in path.read_text().splitlines():
            step, *facts = json.loads(line)
            assert done.setdefault(step, facts) == facts, f"{path.stem}: step {step} was done again otherwise"
    return found
