"""Staging from a device: right whatever is queued, pinned, and beside the training. Needs a CUDA device."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from sgpu.checkpoint import Checkpointer, CheckpointPolicy
from sgpu.checkpoint.live.cuda import Pinned, SideStreams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def _trained(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    _step(net, optimizer)
    return net, optimizer


def _step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    net(torch.randn(8, 512, device="cuda")).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("staging", ["foreground", "background"])
def test_what_was_saved_is_the_state_at_the_call(tmp_path: pathlib.Path, staging: str) -> None:
    net, optimizer = _trained("cuda")
    with Checkpointer(
        CheckpointPolicy(), {"model": net, "optimizer": optimizer}, root=tmp_path, staging=staging,  # type: ignore[arg-type]
    ) as checkpointer:  # fmt: skip
        for step in range(5):
            for _ in range(3):
                _step(net, optimizer)  # queued, not waited for
            checkpointer.save(step)
            net(torch.randn(8, 512, device="cuda")).sum().backward()  # runs beside the copy
            if step == 4:
                expected = {name: value.clone() for name, value in net.state_dict().items()}
            optimizer.step()
        checkpointer.wait()
        assert any(not torch.equal(value, expected[name]) for name, value in net.state_dict().items())
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step == 4
        assert all(torch.equal(value, expected[name]) for name, value in net.state_dict().items())
        assert all(value.is_cuda for value in net.state_dict().values())


@pytest.fixture
def pinned() -> Iterator[Pinned]:
    held = Pinned()
    yield held
    held.release()


def test_memory_is_pinned_and_let_go(pinned: Pinned) -> None:
    memory = torch.zeros(2**20, dtype=torch.uint8)
    pinned.pin(memory)
    assert memory.is_pinned()
    pinned.release()
    assert not memory.is_pinned()


def test_a_copy_does_not_wait_for_what_is_queued_later(pinned: Pinned) -> None:
    source = torch.full((2**20,), 3, dtype=torch.uint8, device="cuda")
    target = torch.zeros(2**20, dtype=torch.uint8)
    pinned.pin(target)
    streams = SideStreams([source])
    torch.cuda._sleep(2_000_000_000)  # about a second, on the training's stream
    queued = torch.cuda.Event()
    queued.record()
    streams.copy(source, target)
    streams.finish()
    assert not queued.query()
    assert bool((target == 3).all())
