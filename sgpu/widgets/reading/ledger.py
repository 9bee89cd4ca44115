"""Where the time of all ranks went, and how far they are, from the heartbeat page."""

from __future__ import annotations

import pathlib

from sgpu.contract.heartbeat import Beat, Page, WorkerState
from sgpu.widgets.reading.snapshot import Goodput, Part
from sgpu.widgets.words import percent, seconds, workers

# What is shown, in this order: name, label, the ledger's categories that it sums.
_PARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("productive", "productive", ("productive",)),
    ("data", "waiting for data", ("data",)),
    ("checkpoint", "blocked by checkpoints", ("checkpoint",)),
    ("restart", "restoring and restarting", ("restoring", "restarting")),
    ("recomputing", "recomputing", ("recomputing",)),
    ("starting", "starting up", ("starting",)),
    ("other", "other", ("idle",)),
)
_DATA_IS_THE_BOTTLENECK = 0.1
_ENOUGH_SECONDS = 5.0
_ENOUGH_STEPS = 20


class HeartbeatReader:
    """Opens the page when it appears, and again when it was replaced."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._page: Page | None = None
        self._file: tuple[int, int] | None = None

    def beats(self) -> list[Beat]:
        """One a rank; empty while there is no page."""
        try:
            found = self._path.stat()
            if self._page is None or self._file != (found.st_dev, found.st_ino):
                self.close()
                self._page, self._file = Page(self._path), (found.st_dev, found.st_ino)
            return self._page.beats()
        except (FileNotFoundError, ValueError):  # not yet there; or a slot that no version of ours has written
            return []

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
        self._page, self._file = None, None


def slowest_step(beats: list[Beat]) -> int | None:
    """None unless every rank has said where it is (a restarted one has not, until it has restored)."""
    ready = (WorkerState.TRAINING, WorkerState.FINISHED)
    return min(beat.step for beat in beats) if beats and all(beat.state in ready for beat in beats) else None


def last_sign_ns(beats: list[Beat]) -> int:
    """The newest moment that any rank has written; open intervals of an ended run are counted up to it."""
    return max(max(beat.beat_ns, beat.ledger_since_ns) for beat in beats)


def goodput(beats: list[Beat], until_ns: int, accelerator: str, told: str = "") -> Goodput | None:
    """Sums the ledgers of all ranks. None while no time has passed.

    Args:
        until_ns: monotonic nanoseconds up to which open intervals count.
        told: what the loader says of its bottleneck, which beats what the shares alone say.
    """
    totals: dict[str, float] = {}
    for beat in beats:
        for name, amount in beat.ledger_seconds(until_ns).items():
            totals[name] = totals.get(name, 0.0) + max(0.0, amount)
    whole = sum(totals.values())
    if whole <= 0:
        return None
    parts = tuple(
        Part(name=name, label=label, seconds=amount, share=amount / whole)
        for name, label, categories in _PARTS
        for amount in [sum(totals.get(category, 0.0) for category in categories)]
    )
    share = parts[0].share
    return Goodput(
        share=share,
        rank_seconds=whole,
        ranks=len(beats),
        parts=parts,
        sentence=f"{percent(share)} of {workers(len(beats), accelerator)} × {seconds(whole / len(beats))} productive",
        advice=_advice(
            parts[1].share, (whole - totals.get("starting", 0.0)) / len(beats), max(beat.step for beat in beats), told
        ),
    )


def _advice(data_share: float, since_start_seconds: float, steps: int, told: str) -> str:
    """Nothing of a run that has hardly begun: its first batches wait for workers to start."""
    if data_share <= _DATA_IS_THE_BOTTLENECK or since_start_seconds < _ENOUGH_SECONDS or steps < _ENOUGH_STEPS:
        return ""
    if told:
        return told
    return (
        f"Waiting for data takes {percent(data_share)} of the time: the data pipeline is the bottleneck. Try more "
        "num_workers or a larger prefetch_factor in the DataLoader, lighter transforms, or a faster cache_dir."
    )
