"""A remote store: what fsspec reaches under `remote://`, and what answers 503 where the page says so."""

from __future__ import annotations

import errno
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tests.faults.rig.disk import Disk

_ASKED = ("info", "ls", "open", "cat_file", "pipe_file", "put_file", "get_file", "rm_file", "rm", "makedirs", "exists")


class Remote(LocalFileSystem):  # type: ignore[misc]
    """A folder, as far as its files go."""

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
        return getattr(LocalFileSystem, name)(self, *arguments, **options)

    return ask


def install(disk: Disk) -> None:
    """In the process that all others of a cell are forked from."""
    Remote.disk = disk
    for name in _ASKED:
        setattr(Remote, name, _asked(name))
    fsspec.register_implementation("remote", Remote, clobber=True)
