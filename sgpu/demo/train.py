"""The demo's training function: what a user would write, plus a ledger line a step as evidence."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

import sgpu
from sgpu.data import DataLoader, VolumeDataset


class Net(nn.Module):
    """A small CNN for 1 x 32 x 32 images and ten classes, with dropout: its draws must resume too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Dropout(0.25), nn.Linear(32 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)  # type: ignore[no-any-return]


class Images(IterableDataset[tuple[torch.Tensor, int, str]]):
    """Decodes each file, moves it by up to two pixels at random; its label is its folder's name."""

    def __init__(self, files: Iterable[str]) -> None:
        self.files = files

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int, str]]:
        import numpy as np
        from PIL import Image

        for path in self.files:
            with Image.open(path) as image:
                pixels = torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)
            down, right = (int(draw) for draw in torch.randint(-2, 3, (2,)))
            place = pathlib.Path(path)
            yield pixels.roll((down, right), (0, 1))[None], int(place.parent.name), f"{place.parent.name}/{place.name}"


def train(volume: str, evidence: str, epochs: int = 5, seed: int = 7, learning_rate: float = 2e-3) -> dict[str, Any]:
    """Trains on the volume; appends to `evidence` which files each step trained.

    Returns:
        A hash of the final weights and optimizer state, the last loss, and the steps.
    """
    device = sgpu.runtime.init()
    sgpu.seed_everything(seed + sgpu.runtime.rank())
    model = DistributedDataParallel(Net().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    loader: Any = DataLoader(Images(VolumeDataset(volume, pattern="**/*.jpg", shuffle=True, seed=seed)), batch_size=32)
    loop = sgpu.TrainLoop(model=model, optimizer=optimizer, loader=loader, epochs=epochs, checkpoint_every=15)
    ledger = pathlib.Path(evidence) / f"rank{sgpu.runtime.rank()}.jsonl"
    with ledger.open("a", buffering=1) as lines:
        for images, labels, names in loop:
            epoch = loop.epoch
            scores = model(images.to(device))
            loss = nn.functional.cross_entropy(scores, labels.to(device))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            accuracy = (scores.argmax(1).cpu() == labels).float().mean()
            loop.log(loss=loss.item(), accuracy=accuracy.item())
            record = {"time": time.time(), "pid": os.getpid(), "step": loop.step + 1, "epoch": epoch}
            lines.write(json.dumps({**record, "files": list(names)}) + "\n")
    return {"hash": _hash(model, optimizer), "loss": loop.metrics["loss"], "steps": loop.step}


def _hash(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of every bit of the weights, buffers and optimizer state."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
    for index, state in optimizer.state_dict()["state"].items():
        for name, value in sorted(state.items()):
            digest.update(f"{index}/{name}".encode() + value.detach().cpu().numpy().tobytes())
    return digest.hexdigest()
