"""What a failure of the storage means: what was needed, what is free, whether it heals, what to do. Without torch."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import CheckpointError, CheckpointSaveError

_ADVICE: Mapping[int, str] = {
    errno.ENOSPC: "Free some space there, keep fewer checkpoints, or name another root",
    errno.EDQUOT: "The quota of this user is used up, whatever is free there: remove files, or name another root",
    errno.EROFS: "It is mounted read-only: mount it for writing, or name another root",
    errno.EACCES: "This user may not write there: change the permissions, or name another root",
    errno.EPERM: "This user may not write there: change the permissions, or name another root",
    errno.ENOTDIR: "There is a file where a folder should be: move it away, or name another root",
    errno.EEXIST: "There is a file where a folder should be: move it away, or name another root",
    errno.EISDIR: "There is a folder where a file should be: move it away, or name another root",
    errno.EFBIG: "A file may not become so large there (see `ulimit -f`): raise the limit, or name another root",
    errno.ENAMETOOLONG: "Name a root with a shorter path",
}  # fmt: skip
_GOES_ON = "What was saved earlier is untouched: run.resume(), or the same call again, goes on from the newest of it."
_NOT_SAVED = " was not saved: "
_FACTS = ("rank", "unrecoverable", "errno", "needed_bytes", "free_bytes")


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """`facts` are for the error that tells it: `unrecoverable` where trying again cannot help."""

    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def of(error: OSError, store: Store, needed_bytes: int | None = None) -> Trouble:
    """What an operation's failure means; `needed_bytes` is what was to be written."""
    number = _number(error)
    said = str(error) if str(error) else type(error).__name__
    advice = _ADVICE.get(number)
    if advice is None:
        return Trouble(text=said)
    facts: dict[str, Any] = {"unrecoverable": True, "errno": number}
    told = [said]
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = free_bytes(store)
        if needed_bytes is not None:
            facts["needed_bytes"] = needed_bytes
            told.append(f"{needed_bytes:,} bytes were needed")
        if free is not None:
            facts["free_bytes"] = free
            told.append(f"{free:,} bytes are free at {store.url}")
    return Trouble(text=f"{'; '.join(told)}. {advice}. {_GOES_ON}", facts=facts)


def may_heal(error: OSError) -> bool:
    """Whether to try again may help, without anybody's doing."""
    return _number(error) not in _ADVICE


def _number(error: OSError) -> int:
    return error.errno or (errno.EACCES if isinstance(error, PermissionError) else 0)


def free_bytes(store: Store) -> int | None:
    """What this user may still write there; None where nobody says."""
    place = store.local_root
    if place is None:
        return None
    for folder in (place, *place.parents):
        try:
            found = os.statvfs(folder)
        except OSError:
            continue  # not made yet, or a file is in its way
        return found.f_bavail * found.f_frsize
    return None


def not_written(error: OSError, store: Store) -> CheckpointError:
    """A root where nothing can be saved."""
    trouble = of(error, store)
    return CheckpointError(
        f"checkpoints cannot be written to {store.url}: {type(error).__name__}: {trouble.text}",
        path=store.url,
        **trouble.facts,
    )


@contextlib.contextmanager
def explained(store: Store, needed_bytes: int | None = None) -> Iterator[None]:
    """For a save into `store` itself: failures of the storage become CheckpointSaveErrors."""
    try:
        yield
    except OSError as error:
        trouble = of(error, store, needed_bytes)
        raise CheckpointSaveError(f"{store.url}{_NOT_SAVED}{trouble.text}", path=store.url, **trouble.facts) from error


def not_saved(
    error: Exception, store: Store, *, folder: str, step: int, rank: int, needed_bytes: int | None = None
) -> CheckpointSaveError:
    """The cause, with the rank that it happened on."""
    facts: dict[str, Any] = {"path": f"{store.url}/{folder}", "step": step, "rank": rank}
    text = str(error)
    if isinstance(error, OSError):
        trouble = of(error, store, needed_bytes)
        text = f"rank {rank}: {trouble.text}"
        facts.update(trouble.facts)
    elif isinstance(error, CheckpointError):
        facts = {**error.facts, **facts, "rank": error.facts.get("rank", rank)}
    return CheckpointSaveError(f"the checkpoint of step {step}{_NOT_SAVED}{text}", **facts)


def cause(error: CheckpointSaveError) -> tuple[str, dict[str, Any]]:
    """What the other ranks should know of it: words, and facts."""
    text = str(error)
    told = text.partition(_NOT_SAVED)[2] or text
    return told, {name: error.facts[name] for name in _FACTS if name in error.facts}
