"""A process group that was given up while it was being made leaves no trace in the name of the next."""

from __future__ import annotations

import pytest
import torch.distributed.distributed_c10d as c10d

from sgpu.worker import clearing


def test_the_next_group_has_the_name_that_a_fresh_process_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d._world, "group_count", 0)
    first = c10d._process_group_name([], use_hashed_name=False)
    assert c10d._process_group_name([], use_hashed_name=False) != first, "else there is nothing to forget"
    clearing._drop_groups()
    assert c10d._process_group_name([], use_hashed_name=False) == first
