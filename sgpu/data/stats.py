"""What a loader measured about itself."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sgpu.data.counters import CacheCounts

_KEPT = 4096


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """Counts since the loader was made, on this rank (files: of all processes that fetch for it).

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
    """Adds up what `LoaderStats` tells."""

    def __init__(self) -> None:
        self.batches = self.samples = 0
        self.last_seconds = self.total_seconds = 0.0
        self._recent: deque[float] = deque(maxlen=_KEPT)

    def add(self, samples: int, seconds: float) -> None:
        self.batches += 1
        self.samples += samples
        self.last_seconds = seconds
        self.total_seconds += seconds
        self._recent.append(seconds)

    def stats(self, counts: list[CacheCounts]) -> LoaderStats:
        recent = sorted(self._recent)
        downloads = sum(count.downloads for count in counts)
        return LoaderStats(
            batches=self.batches, samples=self.samples, fetch_seconds_total=self.total_seconds,
            fetch_seconds_mean=self.total_seconds / self.batches if self.batches else 0.0,
            fetch_seconds_p99=recent[min(len(recent) - 1, int(0.99 * len(recent)))] if recent else 0.0,
            cache_hits=max(0, sum(count.requests for count in counts) - downloads), cache_misses=downloads,
            downloaded_bytes=sum(count.downloaded_bytes for count in counts),
            retries=sum(count.retries for count in counts), bypassed=sum(count.bypassed for count in counts),
        )  # fmt: skip
