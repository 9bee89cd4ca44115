"""What a batch cost whoever made it: measured in the worker, and travelling with the batch."""

from __future__ import annotations

import time
from typing import NamedTuple


class Work(NamedTuple):
    """Seconds of a worker for a batch.

    Attributes:
        making: all of it.
        files: of these, waiting for files to come.
        collating: of these, making a batch of the samples.
    """

    making: float = 0.0
    files: float = 0.0
    collating: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(self.making + other.making, self.files + other.files, self.collating + other.collating)


class FileClock:
    """How long this process has waited for files."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def add_since(self, began: float) -> None:
        self.seconds += time.perf_counter() - began


waiting_for_files = FileClock()


class Stopwatch:
    """Order of calls: made when a batch is begun; `samples_made` before it is collated; `work` at its end."""

    def __init__(self) -> None:
        self._began = self._made = time.perf_counter()
        self._files = waiting_for_files.seconds

    def samples_made(self) -> None:
        self._made = time.perf_counter()

    def work(self) -> Work:
        now = time.perf_counter()
        return Work(now - self._began, waiting_for_files.seconds - self._files, now - self._made)
