"""A folder of this machine, or one that is mounted here."""

from __future__ import annotations

import os
import pathlib
import shutil
import threading
from collections.abc import Iterable, Sequence

from sgpu.checkpoint.stores import unbuffered
from sgpu.checkpoint.stores.store import Observe, pieces
from sgpu.contract import atomic


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
