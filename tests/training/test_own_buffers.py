"""A rank's own buffers, also where DDP broadcasts them before each forward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from sgpu.training.buffers import OwnBuffers


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_statistics_come_back_as_this_rank_had_them(group: None) -> None:
    """What a rank added to them after the last broadcast is its own."""
    norm = torch.nn.BatchNorm1d(2)
    model = torch.nn.parallel.DistributedDataParallel(norm)
    model(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
    assert norm.running_mean is not None
    before = norm.running_mean.clone()
    state = OwnBuffers(model, world_size=2).state_dict()
    norm.reset_running_stats()
    assert not torch.equal(norm.running_mean, before)
    OwnBuffers(model, world_size=2).load_state_dict(state)
    assert torch.equal(norm.running_mean, before)
