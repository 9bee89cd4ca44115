"""What can be done to a checkpoint. Each gives a sentence, or raises an SgpuError that says why not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from sgpu import resuming, standing
from sgpu.checkpoint import Catalog
from sgpu.checkpoint.keeping import prune
from sgpu.contract.errors import CheckpointError, CheckpointNotFoundError, InputError
from sgpu.contract.status import read_status
from sgpu.widgets.checkpoints.rows import Shelf
from sgpu.widgets.words import count, plural

FORMATS = {"safetensors": ".safetensors", "torch": ".pt", "hf": "-hf"}  # format -> how a name for it ends


def verify(shelf: Shelf, step: int) -> str:
    """Reads every byte and compares it with its checksum."""
    told = Catalog(shelf.place.root).verify(step, deep=True)
    if told.ok and not told.verified:
        return f"step {count(step)} has no checksums to compare with; its files have the right sizes"
    if told.ok:
        return f"step {count(step)}: every byte is as it was written"
    why = "; ".join(told.problems[:3])
    more = f"; and {count(len(told.problems) - 3)} more" if len(told.problems) > 3 else ""
    shelf.mark_damaged(step, why + more)
    raise CheckpointError(f"step {count(step)} is damaged: {why}{more}", path=told.path, step=step)


def export(shelf: Shelf, step: int, path: str, kind: str) -> str:
    """Writes all tensors into one new file, or the model into a folder as Hugging Face's libraries have it."""
    if not path.strip():
        raise InputError("give the name of the new file or folder")
    return f"step {count(step)} as {kind}: {Catalog(shelf.place.root).export(step, path.strip(), format=kind)}"


def delete(shelf: Shelf, step: int) -> str:
    """Removes a step, all its attempts; un-committed first, so that half of one is never taken for a checkpoint.

    Raises:
        InputError: it is protected, or the last valid one, or a run that is going on was restored from it.
        CheckpointNotFoundError: there is no such step.
    """
    shelf.refresh()
    folders = shelf.attempts(step)
    if not folders:
        raise CheckpointNotFoundError(f"there is no checkpoint of step {count(step)} any more", step=step)
    row = shelf.row(step)
    if row is not None and row.protected:
        raise InputError(f"step {count(step)} is protected; end the protection first")
    if shelf.check(step) is not None and not _another_is_whole(shelf, step):
        raise InputError(f"step {count(step)} is the last valid checkpoint; it is not deleted")
    if shelf.restored_step == step and _going_on(shelf):
        raise InputError(f"the run was resumed from step {count(step)} and is going on; it is not deleted")
    for folder in folders:
        prune.remove(shelf.store, folder)
    shelf.refresh()
    return f"step {count(step)} is deleted ({plural(len(folders), 'folder')})"


def resume(shelf: Shelf, step: int) -> str:
    """Goes on from a step: the run itself where it would take this one, else a new run.

    Raises:
        InputError: no run is known that wrote it.
        CheckpointNotFoundError, CheckpointCorruptError: there is no such valid step.
    """
    if shelf.place.run is None:
        raise InputError("these checkpoints belong to no run that is known here")
    former = shelf.place.run
    run = resuming.resume(former, standing.status_of(former), step)
    went = "goes on from" if run == former else f"is new and begins at {former.id}'s"
    return f'run {run.id} {went} step {count(step)}; sgpu.attach("{run.id}") shows it'


def protect(shelf: Shelf, step: int, reason: str) -> str:
    """No run prunes it from now on."""
    Catalog(shelf.place.root).protect(step, reason)
    shelf.refresh()
    return f"step {count(step)} is protected: no run prunes it, and it cannot be deleted here"


def unprotect(shelf: Shelf, step: int) -> str:
    """Leaves it to the rules again."""
    Catalog(shelf.place.root).unprotect(step)
    shelf.refresh()
    return f"step {count(step)} is no longer protected"


def verify_all(shelf: Shelf, tell: Callable[[str], None]) -> str:
    """Reads every byte of all checkpoints, and marks those that are damaged; nobody deletes them.

    Args:
        tell: hears how far it is.
    """
    steps = [row.step for row in shelf.rows]
    for done, step in enumerate(steps):
        tell(f"reading every byte: {count(done)} of {plural(len(steps), 'checkpoint')} …")
        with contextlib.suppress(CheckpointError):  # its row says what is wrong
            verify(shelf, step)
    damaged = [row.step for row in shelf.rows if row.state == "damaged"]
    if not damaged:
        return f"{plural(len(steps), 'checkpoint')}: no byte differs from what was written"
    some = ", ".join(count(step) for step in damaged[:10]) + (" …" if len(damaged) > 10 else "")
    return f"{count(len(damaged))} of {plural(len(steps), 'checkpoint')} damaged (step {some}); left for a look"


def newest_whole(shelf: Shelf) -> int | None:
    """The step that a run would take, by the cheap check."""
    for row in shelf.rows:
        if row.state in ("valid", "unverified") or (row.state == "unchecked" and shelf.check(row.step) is not None):
            return row.step
    return None


def _another_is_whole(shelf: Shelf, step: int) -> bool:
    return any(row.step != step and shelf.check(row.step) is not None for row in shelf.rows)


def _going_on(shelf: Shelf) -> bool:
    status = read_status(shelf.place.run) if shelf.place.run else None
    return status is not None and not status.final
