"""Ranks with unequal data, as real processes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

RANK = """
import datetime, json, sys, warnings
import torch, torch.distributed as dist
from torch.utils.data import IterableDataset
from sgpu.data import DataLoader
rank, store, lengths, start = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
saved = sys.argv[5] == "saved"
limit = datetime.timedelta(seconds=30)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
class Uneven(IterableDataset):
    def __iter__(self):
        return iter(range(lengths[rank]))
loader = DataLoader(Uneven(), 2, num_workers=0)
loader.set_epoch(start[rank])
told, seen = [], []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        for _ in range(2):
            for batch in loader:
                seen.append(batch.tolist())
                if saved:
                    loader.state_dict()
                dist.all_reduce(torch.zeros(1))
            seen.append(loader.epoch)
    except Exception as problem:
        told.append(f"{type(problem).__name__}: {problem}")
    told += [str(warning.message) for warning in caught]
print(json.dumps([seen, told]))
dist.destroy_process_group()
"""


def both(tmp_path: pathlib.Path, lengths: list[int], epochs: list[int], how: str = "") -> list[Any]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), f"{tmp_path}/store", json.dumps(lengths), json.dumps(epochs), how],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]  # fmt: skip
    answers = []
    for process in ranks:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        answers.append(json.loads(out.strip().splitlines()[-1]))
    return answers


@pytest.mark.parametrize("how", ["", "saved"])
def test_all_ranks_stop_when_the_first_runs_out(how: str, tmp_path: pathlib.Path) -> None:
    """Also where a position that is asked for finds out, on the short rank alone, that the epoch has ended."""
    (short, told_short), (long, told_long) = both(tmp_path, [4, 7], [0, 0], how)
    assert short == long == [[0, 1], [2, 3], 1, [0, 1], [2, 3], 2]
    assert told_short == []
    assert [text.split(";")[0] for text in told_long] == [
        f"the data of rank 0 ended first in epoch {epoch}" for epoch in (0, 1)
    ]


def test_ranks_in_different_epochs_are_told(tmp_path: pathlib.Path) -> None:
    for seen, told in both(tmp_path, [4, 4], [0, 1]):
        assert seen == []
        assert len(told) == 1
        assert told[0].startswith(
            "PositionError: the ranks' data are in different epochs: rank 0 in epoch 0, rank 1 in"
        )
