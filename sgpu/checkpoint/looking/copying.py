"""A checkpoint in a second root, whole or not at all. Without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

from sgpu.checkpoint.format import names
from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.stores.store import CHUNK_BYTES, Store
from sgpu.checkpoint.writing import newest
from sgpu.contract import atomic
from sgpu.contract.errors import InputError


def copy(source: Store, opened: Opened, step: int, target: Store) -> str:
    """Its path in `target`. Files on one disk are linked, which costs no room; the commit record comes last.

    Raises:
        InputError: `target` has this step.
    """
    folder = names.folder_name(step, 0)
    taken = [found.name for found in names.step_folders(target.names("")) if found.step == step]
    if taken:
        raise InputError(f"{target.url} has step {step} already ({taken[0]}); copy to another root", path=target.url)
    files = sorted([*opened.manifest.files, names.MANIFEST] if opened.manifest else source.sizes(opened.folder))
    for file in sorted(files, key=lambda name: name == names.METADATA):
        before, after = (f"{place}/{file}" if place else file for place in (opened.folder, folder))
        if not _linked(source, before, target, after):
            target.put(after, _pieces(source, before))
    newest.note(target, folder)
    return f"{target.url}/{folder}"


def _linked(source: Store, before: str, target: Store, after: str) -> bool:
    """Published files are never written again, so that both roots may hold the same one."""
    if source.local_root is None or target.local_root is None:
        return False
    place = target.local_root / after
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.local_root / before, place)
    except FileNotFoundError:
        raise
    except OSError:  # another disk, or one without links
        return False
    atomic.sync_folder(place.parent)
    return True


def _pieces(store: Store, path: str) -> Iterator[memoryview]:
    offset = 0
    while content := store.read(path, offset, CHUNK_BYTES):
        yield memoryview(content)
        offset += len(content)
