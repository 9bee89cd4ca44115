"""What a loader measured about itself."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sgpu.data.measuring.counters import CacheCounts
from sgpu.data.measuring.report import LoaderReport, Measured, report_of
from sgpu.data.measuring.work import Work

_KEPT = 4096
_WINDOW_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """Counts since the loader was made, on this rank (files: of all processes that fetch for its data set).

    Attributes:
        batches: handed to the loop.
        fetch_seconds_total: what the loop waited for batches.
        fetch_seconds_p99: of the last 4096 batches.
        cache_hits: files handed out that needed no download.
        cache_misses: files that were downloaded, ahead of time or on demand.
        bypassed: files read around the cache, for lack of room.
    """

    batches: int
    samples: int
    fetch_seconds_total: float
    fetch_seconds_mean: float
    fetch_seconds_p99: float
    cache_hits: int
    cache_misses: int
    downloaded_bytes: int
    retries: int
    bypassed: int


class Meter:
    """Adds up what `LoaderStats` and `LoaderReport` tell.

    Args:
        counts: of the caches, also from before this meter; that is left out.
    """

    def __init__(self, counts: Callable[[], CacheCounts]) -> None:
        self._all_counts, self._before = counts, counts()
        self._began = self._waited = 0.0  # without what first batches waited
        self._work = Work()
        self._looked: tuple[float, int] = (0.0, 0)
        self._best_bytes_per_second = 0.0
        self.batches = self.samples = self._first_bytes = 0
        self.last_seconds = self.total_seconds = 0.0
        self._recent: deque[float] = deque(maxlen=_KEPT)

    def add(self, samples: int, seconds: float, work: Work, *, first: bool) -> None:
        """`first`: of a pass over the data, which waits for workers to begin; a report leaves that out."""
        now = time.perf_counter()
        if self.batches:
            self._waited += 0.0 if first else seconds
            self._began += seconds if first else 0.0
            self._work = self._work.plus(work)
        else:
            self._began, self._looked = now, (now, self._downloaded())
            self._first_bytes = self._looked[1]
        if now - self._looked[0] >= _WINDOW_SECONDS:
            self._look(now)
        self.batches += 1
        self.samples += samples
        self.last_seconds = seconds
        self.total_seconds += seconds
        self._recent.append(seconds)

    def _counts(self) -> CacheCounts:
        return self._all_counts().plus(self._before, -1)

    def _downloaded(self) -> int:
        return self._counts().downloaded_bytes

    def _look(self, now: float) -> None:
        """Another window has passed: was it the best?"""
        then, before = self._looked
        self._looked = now, self._downloaded()
        self._best_bytes_per_second = max(self._best_bytes_per_second, (self._looked[1] - before) / (now - then))

    def report(self, workers: int) -> LoaderReport:
        seconds = time.perf_counter() - self._began if self.batches else 0.0
        came = self._downloaded() - self._first_bytes if self.batches else 0
        rate = came / seconds if seconds else 0.0
        return report_of(Measured(
            batches=self.batches, seconds=seconds, waited_seconds=self._waited, work=self._work, workers=workers,
            bytes_per_second=rate, best_bytes_per_second=max(rate, self._best_bytes_per_second),
        ))  # fmt: skip

    def stats(self) -> LoaderStats:
        counts = self._counts()
        recent = sorted(self._recent)
        return LoaderStats(
            batches=self.batches, samples=self.samples, fetch_seconds_total=self.total_seconds,
            fetch_seconds_mean=self.total_seconds / self.batches if self.batches else 0.0,
            fetch_seconds_p99=recent[min(len(recent) - 1, int(0.99 * len(recent)))] if recent else 0.0,
            cache_hits=max(0, counts.requests - counts.downloads), cache_misses=counts.downloads,
            downloaded_bytes=counts.downloaded_bytes, retries=counts.retries, bypassed=counts.bypassed,
        )  # fmt: skip
