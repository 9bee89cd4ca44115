"""A remote store: what fsspec reaches under `remote://`, and what answers 503 where the page says so."""

from __future__ import annotations

import errno
import os
import pathlib
import threading
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.faults.rig.disk import Disk

_ASKED = ("info", "ls", "open", "cat_file", "pipe_file", "put_file", "get_file", "rm_file", "rm", "makedirs", "exists")


class Objects(LocalFileSystem):  # type: ignore[misc]
    """A folder whose files are there whole or not at all, as objects are."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_options: Any) -> None:
        target = pathlib.Path(self._strip_protocol(path))
        aside = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        aside.write_bytes(value)
        try:
            if mode == "create":
                os.link(aside, target)
                aside.unlink()
            else:
                aside.replace(target)
        except BaseException:
            aside.unlink()
            raise

    def put_file(self, lpath: str, rpath: str, **_options: Any) -> None:
        self.pipe_file(rpath, pathlib.Path(lpath).read_bytes())


class Remote(Objects):
    """Objects behind a server that may refuse to answer."""

    protocol = "remote"
    disk: Disk

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        bare = path.removeprefix("remote://") if isinstance(path, str) else path
        return super()._strip_protocol(bare)


def _asked(name: str) -> Any:
    def ask(self: Remote, *arguments: Any, **options: Any) -> Any:
        if self.disk.refuses_remote():
            raise OSError(errno.EIO, "503 Slow Down")
        return getattr(Objects, name)(self, *arguments, **options)

    return ask


def install(disk: Disk) -> None:
    """In the process that all others of a cell are forked from."""
    Remote.disk = disk
    for name in _ASKED:
        setattr(Remote, name, _asked(name))
    fsspec.register_implementation("remote", Remote, clobber=True)
