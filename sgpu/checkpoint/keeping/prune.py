"""Which checkpoints go. Deciding is pure; removing un-commits first. Without torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sgpu.checkpoint.format import names
from sgpu.checkpoint.keeping import protection
from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import InputError
from sgpu.contract.failpoint import failpoint
from sgpu.contract.policies import CheckpointPolicy


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A committed checkpoint. `valid`: it passed the cheap check. `score`: its metric for `keep_best`."""

    folder: names.StepFolder
    valid: bool
    score: float | None = None


def choose(candidates: Sequence[Candidate], policy: CheckpointPolicy, protected: Collection[str]) -> list[str]:
    """Names of folders to remove, oldest first.

    The newest valid one never goes, nor do those in `protected`. Damaged ones never go: they are told, and whoever
    has looked at them removes them.
    """
    valid = sorted((c for c in candidates if c.valid), key=lambda c: c.folder, reverse=True)
    newest_of: dict[int, Candidate] = {}
    for candidate in valid:
        newest_of.setdefault(candidate.folder.step, candidate)
    distinct = list(newest_of.values())
    if not distinct:
        return []
    kept = {c.folder.name for c in distinct[: policy.keep_last]} | set(protected)
    if policy.keep_every is not None:
        kept |= {c.folder.name for c in distinct if c.folder.step % policy.keep_every == 0}
    kept |= _best(distinct, policy.keep_best)
    return [c.folder.name for c in sorted(valid, key=lambda c: c.folder) if c.folder.name not in kept]


def check_rule(rule: dict[str, Any] | None) -> None:
    """Raises InputError unless `keep_best` can be followed."""
    if rule is None:
        return
    count = rule.get("count", 1)
    whole = isinstance(count, int) and not isinstance(count, bool) and count >= 1
    known = rule.keys() <= {"metric", "mode", "count"} and rule.get("mode", "min") in ("min", "max")
    if not (whole and known and isinstance(rule.get("metric"), str)):
        raise InputError(
            f'keep_best: expected {{"metric": name, "mode": "min" or "max", "count": 1 or more}}; found {rule!r}'
        )


def _best(distinct: list[Candidate], rule: dict[str, Any] | None) -> set[str]:
    if rule is None:
        return set()
    check_rule(rule)
    sign = -1.0 if rule.get("mode", "min") == "max" else 1.0
    scored = [(sign * c.score, -c.folder.step, c.folder.name) for c in distinct if c.score is not None]
    scored = [entry for entry in scored if entry[0] == entry[0]]  # a NaN is never best
    return {name for _, _, name in sorted(scored)[: rule.get("count", 1)]}


def score(metadata: dict[str, Any], rule: dict[str, Any] | None) -> float | None:
    """The metric of a checkpoint: in its metadata, or in `metrics` there."""
    if rule is None:
        return None
    metrics = metadata.get("metrics")
    places = [metrics, metadata] if isinstance(metrics, dict) else [metadata]
    for place in places:
        value = place.get(str(rule.get("metric")))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None


def remove(store: Store, folder: str) -> None:
    """Un-commits, then deletes: a half-deleted folder is never taken for a checkpoint. Not a protected one.

    Of a folder that is a symbolic link, the link goes; what it leads to is somebody else's, and stays as it is.
    """
    if protection.is_protected(store, folder):
        return
    if store.local_root is not None and (store.local_root / folder).is_symlink():
        store.delete(folder)
        return
    store.delete(f"{folder}/{names.METADATA}")
    failpoint("checkpoint.prune")
    store.delete_folder(folder)
