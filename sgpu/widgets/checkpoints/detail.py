"""One checkpoint in words: what it holds besides tensors, how to go on from it, how it differs from another."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.looking.inspection import Difference
from sgpu.contract.status import read_status
from sgpu.widgets.checkpoints.place import Place
from sgpu.widgets.checkpoints.rows import CheckpointRow
from sgpu.widgets.words import count, number, plain, plural, seconds, size

STATE_SIGNS = {"unchecked": "…", "valid": "✓ valid", "unverified": "✓ no checksums", "damaged": "✕ damaged"}
_OBJECTS_SHOWN = 12
_NAMES_SHOWN = 200


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One line about a checkpoint."""

    label: str
    value: str


def when(unix_seconds: float | None) -> str:
    return "" if unix_seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))


def metrics_words(row: CheckpointRow, limit: int = 2) -> str:
    """`loss 0.0123, accuracy 0.98`; a loss first."""
    ordered = sorted(row.metrics, key=lambda name: ("loss" not in name.lower(), name))
    more = f", and {len(ordered) - limit} more" if len(ordered) > limit else ""
    return ", ".join(f"{name} {number(row.metrics[name])}" for name in ordered[:limit]) + more


def facts(row: CheckpointRow, opened: Opened) -> tuple[Fact, ...]:
    """What is in it besides its tensors."""
    manifest = opened.manifest
    metadata = manifest.metadata if manifest else {}
    ranks = [name for name in manifest.files if name.startswith("rank-")] if manifest else []
    found = {
        "path": opened.path,
        "made": when(row.made),
        "size": size(row.size_bytes),
        "world size": count(row.world_size) if row.world_size else "not noted",
        "checksums": "every byte" if manifest else "none: not written by sgpu",
        "data position": _position(metadata),
        "random draws": _ranks_words(opened, ranks),
        "metrics": metrics_words(row, 20),
        "run": (manifest.run_id if manifest else None) or "",
        "versions": ", ".join(f"{k} {v}" for k, v in sorted(manifest.versions.items())) if manifest else "",
        "other objects": _objects(opened.index.objects),
    }
    known = ("epoch", "batch", "data_position", "metrics", *row.metrics)
    found.update(
        {f"noted: {plain(k, 60)}": plain(json.dumps(v, default=str)) for k, v in metadata.items() if k not in known}
    )
    return tuple(Fact(label=label, value=plain(value, 2000)) for label, value in found.items() if value)


def _position(metadata: dict[str, object]) -> str:
    words = [f"{name} {plain(metadata[name], 40)}" for name in ("epoch", "batch") if name in metadata]
    noted = metadata.get("data_position")
    if noted is not None:
        words.append(plain(json.dumps(noted, default=str)))
    return ", ".join(words)


def _ranks_words(opened: Opened, files: Sequence[str]) -> str:
    """Each rank's own state: generators of Python, NumPy, torch and CUDA, and counters."""
    if opened.manifest is None or not files:
        return ""
    total = sum(opened.manifest.files[name].size_bytes for name in files)
    return f"generators and counters of {plural(len(files), 'rank')}, {size(total)}; each rank gets its own back"


def _objects(objects: frozenset[str]) -> str:
    shown = sorted(objects)[:_OBJECTS_SHOWN]
    more = f", and {count(len(objects) - len(shown))} more" if len(objects) > len(shown) else ""
    return ", ".join(plain(name, 80) for name in shown) + more


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """How to go on from a checkpoint: in words and code, and what a button that does it says ("": there is none)."""

    words: str
    code: str
    button: str = ""


def resumption(place: Place, row: CheckpointRow, newest_whole: int | None) -> Resumption:
    """The run itself goes on where it would take this one; else a new run begins here."""
    if row.state == "damaged":
        return Resumption(words="Nothing goes on from a damaged checkpoint; choose a valid one.", code="")
    if place.run is None:
        root, other = place.root, f"{place.root.rstrip('/')}-from-{row.step}"
        return Resumption(
            words="A run takes the newest checkpoint of its root. A new run begins here with a root of its own:",
            code=f"from sgpu.checkpoint import Catalog\n\nCatalog({root!r}).copy({row.step}, {other!r})\n"
            f"# then: @distributed(..., checkpoints={other!r})",
        )
    attached = f'import sgpu\n\nsgpu.attach("{place.run.id}")'
    status = read_status(place.run)
    if status is not None and status.final and status.state != "SUCCEEDED" and row.step == newest_whole:
        return Resumption(
            words="The run goes on from here: it is its newest valid checkpoint.",
            code=f"{attached}.resume()", button="Resume the run from here",
        )  # fmt: skip
    return Resumption(
        words="A new run begins here, with the same function and arguments and a folder of its own; this run stays as "
        "it is.",
        code=f"{attached}.resume(step={row.step})", button="Begin a new run from here",
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two checkpoints side by side. `groups`: a title with its count, and the first names."""

    first: int
    second: int
    summary: str
    groups: tuple[tuple[str, int, tuple[str, ...]], ...]
    facts: tuple[tuple[str, str, str], ...]


def compare(first: CheckpointRow, second: CheckpointRow, told: Difference) -> Comparison:
    titles = (
        (f"only in step {count(first.step)}", told.only_first),
        (f"only in step {count(second.step)}", told.only_second),
        ("another dtype or shape", told.changed),
        ("other values", told.values_changed),
    )
    groups = tuple(
        (title, len(found), tuple(plain(name, 200) for name in found[:_NAMES_SHOWN]))
        for title, found in titles
        if found
    )
    summary = ", ".join(f"{count(amount)} {title}" for title, amount, _ in groups) or "no difference in tensors"
    pairs = [("made", when(first.made), when(second.made)), ("size", size(first.size_bytes), size(second.size_bytes))]
    pairs += [("ranks", str(first.world_size or ""), str(second.world_size or ""))]
    pairs += [
        (name, _value(first, name), _value(second, name)) for name in sorted({*first.metrics, *second.metrics})[:20]
    ]
    return Comparison(first=first.step, second=second.step, summary=summary, groups=groups, facts=tuple(pairs))


def _value(row: CheckpointRow, name: str) -> str:
    return number(row.metrics[name]) if name in row.metrics else ""


def cells(row: CheckpointRow) -> list[str]:
    """A row as the table shows it: made, size, blocked, saved, ranks, state, kept, metrics."""
    return [
        when(row.made),
        size(row.size_bytes) if row.size_bytes is not None else "",
        seconds(row.blocked_seconds) if row.blocked_seconds is not None else "",
        seconds(row.save_seconds) if row.save_seconds is not None else "",
        count(row.world_size) if row.world_size is not None else "",
        STATE_SIGNS[row.state],
        "; ".join(row.kept),
        metrics_words(row),
    ]


COLUMNS = ("made", "size", "blocked", "saved", "ranks", "state", "kept because", "metrics")
