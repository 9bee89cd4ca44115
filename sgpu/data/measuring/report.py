"""Where a loop's time goes: one sentence from a few sums. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgpu.data.measuring.work import Work

Kind = Literal["unknown", "compute", "bandwidth", "latency", "decode", "collate", "transfer"]
LEAST_BATCHES = 20
LEAST_SECONDS = 5.0
_NO_MATTER = 0.02
_MOSTLY = 0.5
_NEAR_THE_BEST = 0.8
_BUSY = 0.75


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a loader measured from its first batch on, without what the first batch of each pass waited.

    Attributes:
        seconds: to now, the loop's own time included.
        waited_seconds: of these, the loop waited for batches.
        work: of all workers, for the batches handed out.
        workers: processes that make batches; 0: the loop's own does.
        bytes_per_second, best_bytes_per_second: from the volume: on the whole, and in its best second.
    """

    batches: int
    seconds: float
    waited_seconds: float
    work: Work
    workers: int
    bytes_per_second: float = 0.0
    best_bytes_per_second: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LoaderReport:
    """Where the time goes. Printed, it is the sentence.

    Attributes:
        kind: "compute": the loop never waits for long. "bandwidth", "latency": files do not come faster, by the speed
            or the response time of the volume. "decode": making samples. "collate": making batches. "transfer":
            bringing them from the workers. "unknown": too little was seen.
        waited_share: of the loop's time, waiting for batches.
        files_share, decode_share, collate_share: of the workers' time for batches.
    """

    kind: Kind
    sentence: str
    batches: int
    seconds: float
    waited_share: float
    files_share: float
    decode_share: float
    collate_share: float
    bytes_per_second: float
    best_bytes_per_second: float

    def __str__(self) -> str:
        return self.sentence


def report_of(found: Measured) -> LoaderReport:
    """The report of what was measured."""
    made = max(found.work.making, 1e-12)
    files, collate = found.work.files / made, found.work.collating / made
    waited = found.waited_seconds / found.seconds if found.seconds > 0 else 0.0
    kind = _kind(found, waited, files)
    return LoaderReport(
        kind=kind, sentence=_sentence(kind, found, waited, files), batches=found.batches, seconds=found.seconds,
        waited_share=waited, files_share=files, decode_share=max(0.0, 1.0 - files - collate), collate_share=collate,
        bytes_per_second=found.bytes_per_second, best_bytes_per_second=found.best_bytes_per_second,
    )  # fmt: skip


def _kind(found: Measured, waited: float, files: float) -> Kind:
    """Waiting least, nothing is to be said; else whatever the workers do most, while they are busy."""
    if found.batches < LEAST_BATCHES or found.seconds < LEAST_SECONDS:
        return "unknown"
    if waited < _NO_MATTER:
        return "compute"
    if files >= _MOSTLY:
        fast = found.best_bytes_per_second > 0 and (
            found.bytes_per_second >= _NEAR_THE_BEST * found.best_bytes_per_second
        )
        return "bandwidth" if fast else "latency"
    if found.work.making < _BUSY * found.seconds * found.workers:
        return "transfer"
    return "collate" if found.work.collating > found.work.making - found.work.files - found.work.collating else "decode"


def _sentence(kind: Kind, found: Measured, waited: float, files: float) -> str:
    share = f"{100 * waited:.0f} % of {found.seconds:.0f} s"
    speed = f"{found.bytes_per_second / 1e6:.1f} MB/s"
    more = "more workers (num_workers)" if found.workers else "workers (num_workers=2 or more)"
    return {
        "unknown": f"Too little was seen to say where the time goes: {found.batches} batches in {found.seconds:.1f} s "
        f"({LEAST_BATCHES} batches and {LEAST_SECONDS:.0f} s are needed).",
        "compute": f"Compute-bound: the loop waited for data for {share}; faster data would not help.",
        "bandwidth": f"Bandwidth-bound: the loop waited for data for {share}, mostly for files, which came at {speed}, "
        f"as fast as the volume gave any (at best {found.best_bytes_per_second / 1e6:.1f} MB/s). A cache that holds "
        "the data helps from the second epoch on, prefetch() before the first; smaller files help at once.",
        "latency": f"Latency-bound: the loop waited for data for {share}, mostly for files, which came at {speed}; at "
        f"best it was {found.best_bytes_per_second / 1e6:.1f} MB/s. Many small files wait for their turn: prefetch(), "
        "a cache that holds the data, or fewer and larger files help.",
        "decode": f"Decode-bound: the loop waited for data for {share}, while the workers made samples "
        f"({100 * (1 - files):.0f} % of their time). Use {more}, or lighter transforms.",
        "collate": f"Collate-bound: the loop waited for data for {share}, while the workers put samples together "
        f"({100 * found.work.collating / max(found.work.making, 1e-12):.0f} % of their time). Use {more}, samples of "
        "tensors, or a lighter collate_fn.",
        "transfer": f"Transfer-bound: the loop waited for data for {share}, while its workers were idle: batches take "
        "long to come from them. Give smaller or fewer tensors a sample, a larger prefetch_factor, or pin_memory.",
    }[kind]  # fmt: skip
