"""What rank 0 does to a root around saves: claims an attempt, prunes, clears what dead attempts left. Without torch."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from sgpu.checkpoint import choose, names, prune
from sgpu.checkpoint.storage import Store
from sgpu.contract.errors import CheckpointError, CheckpointFormatError
from sgpu.contract.policies import CheckpointPolicy


def claim(store: Store, generation: int) -> int:
    """An attempt number that was never used in this root, now taken."""
    found = store.names("")
    used = names.claims(found)
    attempts = [folder.attempt for folder in names.step_folders(found)]
    attempt = max([*used, *attempts], default=-1) + 1
    content = json.dumps({"generation": generation}).encode()
    while not store.create(names.claim_name(attempt), content):
        attempt += 1
    for old in used:
        store.delete(names.claim_name(old))  # the newest is enough to know what was used
    return attempt


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
            opened = choose.open_checkpoint(store, folder.name)
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
        attempt: the running one; its uncommitted folders stay.
    """
    found, foreign = candidates(store, policy.keep_best, damaged)
    gone = prune.choose(found, policy, {*protected, *foreign})
    known = {candidate.folder.name for candidate in found}
    gone += [
        folder.name
        for folder in names.step_folders(store.names(""))
        if folder.name not in known and folder.attempt < attempt and _is_ours(store, folder)
    ]
    for name in gone:
        prune.remove(store, name)
    return gone


def _is_ours(store: Store, folder: names.StepFolder) -> bool:
    """Whether an uncommitted folder is one that an engine began: by its exact name, and what it holds."""
    inside = store.names(folder.name)
    return folder.name == names.folder_name(folder.step, folder.attempt) and any(map(names.is_control, inside))
