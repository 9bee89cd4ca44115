"""The name of the newest checkpoint, for stores whose listings may be late. Without torch.

What an object store answers about one name is as new as the last write to it everywhere; a list of names may be older.
So each commit to a remote store also writes down, under one fixed name, which folder it was. It is a hint: what counts
is the commit record in that folder, and one that could not be written loses nothing but this help.
"""

from __future__ import annotations

import logging

from sgpu.checkpoint.format import names
from sgpu.checkpoint.stores.store import Store

log = logging.getLogger("sgpu.checkpoint")


def note(store: Store, folder: str) -> None:
    """After the commit of `folder`."""
    if store.local_root is not None:
        return
    try:
        store.put(names.NEWEST, [memoryview(folder.encode())])
    except OSError as error:
        log.warning("%s/%s could not be written: %s", store.url, names.NEWEST, error)


def root_names(store: Store) -> list[str]:
    """What lies directly in the root, by its listing and by the hint."""
    found = store.names("")
    if store.local_root is not None:
        return found
    try:
        noted = store.read(names.NEWEST).decode(errors="replace")
    except FileNotFoundError:
        return found
    known = names.parse_step(noted) is not None and store.size(f"{noted}/{names.METADATA}") is not None
    return sorted({*found, noted}) if known else found
