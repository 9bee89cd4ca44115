"""A folder, mounted, that notes each operation which changes it: `python recording_mount.py FOLDER MOUNTPOINT LOG`.

An operation is in the log before its caller goes on, whichever process that is.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import Any

import mfusepy

from sgpu.testing.powercut import Operation

Attributes = ("st_atime_ns", "st_ctime_ns", "st_mtime_ns", "st_gid", "st_uid", "st_mode", "st_nlink", "st_size")


class Recorder(mfusepy.Operations):  # type: ignore[misc]
    use_ns = True

    def __init__(self, folder: str, log: str) -> None:
        self._folder = folder
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND)
        self._paths: dict[int, str] = {}

    def _note(self, kind: Any, path: str, **facts: Any) -> None:
        os.write(self._log, pickle.dumps(Operation(kind=kind, path=path.strip("/"), **facts)))

    def _at(self, path: str) -> str:
        return self._folder + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path))
        told = {name: getattr(found, name) for name in Attributes}
        return {**told, **{name: told[f"{name}_ns"] for name in ("st_atime", "st_ctime", "st_mtime")}}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_") and name != "f_fsid"}

    def open(self, path: str, flags: int) -> int:
        descriptor = os.open(self._at(path), flags & ~os.O_DIRECT)
        self._paths[descriptor] = path
        return descriptor

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        descriptor = os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        self._paths[descriptor] = path
        self._note("create", path)
        return descriptor

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        written = os.pwrite(fh, data, offset)
        self._note("write", self._paths[fh], offset=offset, content=bytes(data[:written]))
        return written

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._at(path), length)
        self._note("truncate", path, offset=length)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._note("sync", self._paths[fh])
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._note("sync_folder", path)
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        del self._paths[fh]
        os.close(fh)
        return 0

    def unlink(self, path: str) -> None:
        os.unlink(self._at(path))
        self._note("unlink", path)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._at(old), self._at(new))
        for descriptor, path in self._paths.items():
            if path == old:
                self._paths[descriptor] = new
        self._note("rename", old, to=new.strip("/"))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._at(path), mode)
        self._note("mkdir", path)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._at(path))
        self._note("rmdir", path)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._at(path), mode)

    def utimens(self, path: str, times: Any = None) -> None:
        os.utime(self._at(path), ns=times)


if __name__ == "__main__":
    folder, mountpoint, log = sys.argv[1:]
    mfusepy.FUSE(Recorder(folder, log), mountpoint, foreground=True, nothreads=True)
