"""What rank 0 does to a root after a save: prunes, and clears what dead attempts left. Without torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from sgpu.checkpoint.format import names
from sgpu.checkpoint.keeping import choose, prune
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing import ownership
from sgpu.contract.errors import CheckpointError, CheckpointFormatError
from sgpu.contract.failpoint import failpoint
from sgpu.contract.policies import CheckpointPolicy


def candidates(
    store: Store, rule: dict[str, Any] | None, damaged: Collection[str] = ()
) -> tuple[list[prune.Candidate], set[str]]:
    """What could go, by the cheap check; and what nobody but its writer may judge, so that it stays.

    Args:
        rule: `keep_best`.
        damaged: folders that pass the cheap check but were found damaged when they were read.
    """
    found, foreign = [], set()
    for folder in choose.committed(store):
        metadata = None
        try:
            opened = choose.open_checkpoint(store, folder.name, shards=False)
            metadata = opened.manifest.metadata if opened.manifest else {}
        except CheckpointFormatError:
            foreign.add(folder.name)
        except CheckpointError:
            pass  # told as damaged when somebody asks for it; here it only must not count as valid
        valid = metadata is not None and folder.name not in damaged
        found.append(prune.Candidate(folder=folder, valid=valid, score=prune.score(metadata or {}, rule)))
    return found, foreign


def prune_root(
    store: Store, policy: CheckpointPolicy, protected: Collection[str], damaged: Collection[str], attempt: int
) -> list[str]:
    """Removes what the policy does not keep, and uncommitted folders of attempts that are over.

    Args:
        protected: folders that stay.
        damaged: see `candidates`.
        attempt: the running one; its uncommitted folders stay, as do those of any run that is alive.
    """
    found, foreign = candidates(store, policy.keep_best, damaged)
    root = store.names("")
    alive = ownership.clear_old(store, root, attempt)
    gone = prune.choose(found, policy, {*protected, *foreign, *names.protected(root)})
    gone += [folder.name for folder in abandoned(store, root, {c.folder.name for c in found}, alive)]
    if gone:
        failpoint("checkpoint.before_prune")
    for name in gone:
        prune.remove(store, name)
    return gone


def abandoned(
    store: Store, root: list[str], committed: Collection[str], alive: Collection[int]
) -> Iterator[names.StepFolder]:
    """Folders of saves that were begun, by an engine that is gone, and never committed.

    An attempt beyond all claims is about to be claimed: other ranks may write before rank 0 has.
    """
    newest = max(names.claims(root), default=-1)
    for folder in names.step_folders(root):
        over = folder.attempt not in alive and folder.attempt <= newest
        if folder.name not in committed and over and _is_ours(store, folder):
            yield folder


def _is_ours(store: Store, folder: names.StepFolder) -> bool:
    """Whether an uncommitted folder is one that an engine began: by its exact name, and what it holds."""
    inside = store.names(folder.name)
    return folder.name == names.folder_name(folder.step, folder.attempt) and any(map(names.is_control, inside))
