"""Loader workers start while other threads of the process hold locks that workers need too."""

from __future__ import annotations

import logging
import pathlib
import threading
from collections.abc import Iterator

import pytest
from torch.utils.data import Dataset

from sgpu.data import DataLoader

LOG = logging.getLogger("tests.forks")
ROUNDS = 50


class Logs(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> int:
        LOG.warning("sample %d", number)
        return number


@pytest.fixture
def half_held(tmp_path: pathlib.Path) -> Iterator[logging.FileHandler]:
    """A log whose lock a thread holds half of the time."""
    handler, over = logging.FileHandler(tmp_path / "log"), threading.Event()
    LOG.addHandler(handler)
    LOG.propagate = False

    def hold() -> None:
        while not over.wait(0.001):
            with handler.lock or threading.Lock():
                over.wait(0.001)

    thread = threading.Thread(target=hold)
    thread.start()
    yield handler
    over.set()
    thread.join()
    LOG.removeHandler(handler)
    LOG.propagate = True
    handler.close()


def test_no_worker_waits_for_a_lock_that_was_held_when_it_began(half_held: logging.FileHandler) -> None:
    for _ in range(ROUNDS):
        with DataLoader(Logs(), batch_size=1, num_workers=2, timeout=60) as loader:
            assert sorted(int(batch) for batch in loader) == [0, 1, 2, 3]
    lines = pathlib.Path(half_held.baseFilename).read_text().splitlines()
    assert sorted(lines) == sorted(ROUNDS * [f"sample {number}" for number in range(4)])
