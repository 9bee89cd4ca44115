"""One small interface to a place for files: a folder, or anything that fsspec reaches. Without torch.

Order of calls: a file is `put` once, whole; it is visible under its name only when all of it is durable. Paths are
relative to the store's root and use "/".
"""

from __future__ import annotations

import os
import pathlib
import shutil
import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

from sgpu.checkpoint.stores import unbuffered
from sgpu.contract import atomic
from sgpu.contract.errors import CheckpointError

CHUNK_BYTES = 4 * 2**20
Observe = unbuffered.Observe


class Store(Protocol):
    """Where checkpoints are kept. Failures are OSError; an absent file is FileNotFoundError."""

    url: str

    @property
    def local_root(self) -> pathlib.Path | None:
        """The folder, where files can be opened by path; None for a remote store."""

    def names(self, folder: str) -> list[str]:
        """Files and folders directly inside `folder` ("" is the root); empty where there is none."""

    def size(self, path: str) -> int | None:
        """Bytes of a file; None where there is no such file (also where it is a folder)."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Bytes of each file directly inside `folder`, from one listing; empty where there is none."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes from `offset` on; fewer than `length` where the file ends before."""

    def put(self, path: str, parts: Iterable[memoryview], observe: Observe | None = None) -> int:
        """Makes `path` hold `parts`, whole or not at all, and durable; returns its bytes.

        `observe` sees each piece once, in order, just before it is written.
        """

    def create(self, path: str, content: bytes) -> bool:
        """Puts a file that must not exist yet; False where it does."""

    def delete(self, path: str) -> None:
        """Removes a file; an absent one is fine."""

    def delete_files(self, paths: Sequence[str]) -> None:
        """Removes files of one folder, many at once; absent ones are fine."""

    def delete_folder(self, folder: str) -> None:
        """Removes a folder and all in it; an absent one is fine."""


def open_store(root: str | os.PathLike[str]) -> Store:
    """The store at a path or URL.

    Raises:
        CheckpointError: the URL's protocol is unknown, or its package is not installed.
    """
    text = os.fspath(root)
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


def pieces(parts: Iterable[memoryview]) -> Iterable[memoryview]:
    """The parts as bytes, cut into chunks."""
    for part in parts:
        flat = part.cast("B") if part.nbytes else part
        for start in range(0, flat.nbytes, CHUNK_BYTES):
            yield flat[start : start + CHUNK_BYTES]


class PosixStore:
    """A folder. Temporary file, fsync, replace, fsync of the folder."""

    def __init__(self, root: pathlib.Path) -> None:
        self.url = str(root)
        self._root = root
        self._lasting: set[pathlib.Path] = set()  # folders whose own names are durable

    @property
    def local_root(self) -> pathlib.Path | None:
        return self._root

    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def size(self, path: str) -> int | None:
        target = self._root / path
        try:
            return target.stat().st_size if target.is_file() else None
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, folder: str) -> dict[str, int]:
        try:
            with os.scandir(self._root / folder) as found:
                return {entry.name: entry.stat().st_size for entry in found if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with open(self._root / path, "rb") as file:
            file.seek(offset)
            return file.read() if length is None else file.read(length)

    def put(self, path: str, parts: Iterable[memoryview], observe: Observe | None = None) -> int:
        target = self._root / path
        self._make_folder(target.parent)
        aside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            try:
                written = unbuffered.write(descriptor, pieces(parts), observe)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(aside, target)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise
        atomic.sync_folder(target.parent)
        return written

    def create(self, path: str, content: bytes) -> bool:
        target = self._root / path
        self._make_folder(target.parent)
        try:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        atomic.sync_folder(target.parent)
        return True

    def delete(self, path: str) -> None:
        target = self._root / path
        target.unlink(missing_ok=True)
        if target.parent.is_dir():
            atomic.sync_folder(target.parent)

    def delete_files(self, paths: Sequence[str]) -> None:
        for path in paths:
            (self._root / path).unlink(missing_ok=True)
        for folder in {(self._root / path).parent for path in paths}:
            if folder.is_dir():
                atomic.sync_folder(folder)

    def delete_folder(self, folder: str) -> None:
        try:
            shutil.rmtree(self._root / folder)
        except FileNotFoundError:
            return

    def _make_folder(self, folder: pathlib.Path) -> None:
        """Each folder on the way lasts before anything is put into it, also one that somebody else has just made."""
        if folder.is_dir() and folder in self._lasting:
            return
        made = [folder]
        while not made[-1].parent.is_dir():
            made.append(made[-1].parent)
        for new in reversed(made):
            new.mkdir(exist_ok=True)
            atomic.sync_folder(new.parent)
        self._lasting.add(folder)
