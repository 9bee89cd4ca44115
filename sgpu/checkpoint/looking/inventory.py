"""Everything in a root that looks like a checkpoint, and what is wrong with it. Without torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from sgpu.checkpoint.format import names
from sgpu.checkpoint.keeping import choose, protection
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing import ownership
from sgpu.contract.errors import CheckpointError, CheckpointFormatError

State = Literal["valid", "unverified", "damaged", "newer format", "being written", "abandoned"]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One folder.

    Attributes:
        state: by the cheap check. "unverified" is whole, but has no checksums (plain DCP); "being written" belongs to
            a run that is alive; "abandoned" was begun and never committed, by one that is not.
        problems: each missing or damaged file of a damaged one, by name.
        protected: whether pruning passes it by, and `reason`, as `Catalog.protect` was told.
        run_id: of the run that wrote it.
    """

    step: int
    folder: str
    path: str
    state: State
    problems: tuple[str, ...] = ()
    protected: bool = False
    reason: str = ""
    size_bytes: int | None = None
    tensors: int | None = None
    world_size: int | None = None
    created_unix_seconds: float | None = None
    run_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def take(store: Store) -> list[Entry]:
    """Newest first."""
    root = store.names("")
    protected, alive = names.protected(root), living(store, root)
    committed = {folder.name for folder in choose.committed(store)}
    return [
        _entry(store, folder, committed=folder.name in committed, alive=folder.attempt in alive, protected=protected)
        for folder in names.step_folders(root)
    ]


def living(store: Store, root: list[str]) -> set[int]:
    """Attempts of runs that are alive."""
    now = time.time()
    owners = {number: ownership.read_owner(store, number) for number in names.claims(root)}
    return {number for number, owner in owners.items() if owner is not None and owner.alive(now)}


def _entry(store: Store, folder: names.StepFolder, *, committed: bool, alive: bool, protected: set[str]) -> Entry:
    kept = folder.name in protected
    known: dict[str, Any] = {
        "step": folder.step, "folder": folder.name, "path": f"{store.url}/{folder.name}", "protected": kept,
        "reason": protection.reason(store, folder.name) if kept else "",
    }  # fmt: skip
    if not committed:
        return Entry(state="being written" if alive else "abandoned", **known)
    try:
        opened = choose.open_checkpoint(store, folder.name, shards=False)
    except CheckpointFormatError as error:
        return Entry(state="newer format", problems=(str(error),), **known)
    except CheckpointError:
        return Entry(state="damaged", problems=tuple(choose.problems(store, folder.name)), **known)
    known["tensors"] = len(opened.index.tensors)
    manifest = opened.manifest
    if manifest is None:
        return Entry(state="unverified", **known)
    return Entry(
        state="valid", size_bytes=manifest.size_bytes, world_size=manifest.world_size,
        created_unix_seconds=manifest.created_unix_seconds, run_id=manifest.run_id, metadata=manifest.metadata, **known,
    )  # fmt: skip
