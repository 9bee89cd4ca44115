"""The store that a path or URL means: a folder, or anything that fsspec reaches."""

from __future__ import annotations

import os
import pathlib
import threading

from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import CheckpointError
from sgpu.contract.places import check_place


def open_store(root: str | os.PathLike[str]) -> Store:
    """The store at a path or URL.

    Raises:
        CheckpointError: the URL's protocol is unknown, or its package is not installed.
        InputError: it looks like a URL, and is none that can be opened.
    """
    text = os.fspath(root)
    check_place("the place of checkpoints", text)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    if "://" not in text:
        return PosixStore(pathlib.Path(text).expanduser().absolute())
    from sgpu.checkpoint.stores.remote import FsspecStore  # fsspec is loaded for URLs only

    return FsspecStore(text)


def check_writable(root: str | os.PathLike[str]) -> None:
    """Writes, reads and removes a small file under `root`.

    Raises:
        CheckpointError: that failed, with the reason; nothing should be started.
    """
    store = open_store(root)
    name = f".sgpu-probe-{os.getpid()}-{threading.get_ident()}"
    content = b"sgpu"
    try:
        store.put(name, [memoryview(content)])
        found = store.read(name)
        store.delete(name)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoints cannot be written to {store.url}: {type(error).__name__}: {error}. "
            "Give a folder or URL that this user may write to.",
            path=store.url,
        ) from error
    if found != content:
        raise CheckpointError(
            f"{store.url} does not give back what was written: expected {content!r}, found {found[:16]!r}. "
            "Choose another place for checkpoints.",
            path=store.url,
        )
