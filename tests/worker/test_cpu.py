"""On a machine without a GPU, NCCL's name is read as gloo's."""

from __future__ import annotations

import pytest

from sgpu.worker.cpu import without_nccl


@pytest.mark.parametrize(
    ("asked", "usable"),
    [
        (None, None), ("nccl", "gloo"), ("NCCL", "gloo"), ("gloo", "gloo"), ("cpu:gloo,cuda:nccl", "cpu:gloo"),
        ("cuda:nccl", "gloo"), ("mpi", "mpi"), ("cpu:gloo", "cpu:gloo"),
    ],
)  # fmt: skip
def test_back_end_names(asked: str | None, usable: str | None) -> None:
    assert without_nccl(asked) == usable
