"""Makes one folder slow, for every Python process that finds this file: a mount with a latency and a shared bandwidth.

An open waits for the latency, and then until the file's bytes would have come through a pipe that all processes share.
On with SLOW_FOLDER, SLOW_OPEN_SECONDS, SLOW_BYTES_PER_SECOND and SLOW_PIPE (a file that holds when the pipe is free).
"""

import builtins
import fcntl
import io
import mmap
import os
import struct
import time

_FOLDER = os.environ.get("SLOW_FOLDER", "")
_FREE = struct.Struct("<d")
_open, _os_open = io.open, os.open


def _pay(path: object) -> None:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(_FOLDER + "/"):
        return
    time.sleep(_OPEN_SECONDS)
    seconds = os.stat(path).st_size / _BYTES_PER_SECOND
    pipe = _os_open(os.environ["SLOW_PIPE"], os.O_RDWR)
    try:
        fcntl.flock(pipe, fcntl.LOCK_EX)  # and no call that lets another thread run until it is closed
        free = max(_FREE.unpack_from(_pipe)[0], time.monotonic()) + seconds
        _FREE.pack_into(_pipe, 0, free)
    finally:
        os.close(pipe)
    time.sleep(max(0.0, free - time.monotonic()))


def _mapped(path: str) -> mmap.mmap:
    pipe = _os_open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(pipe, _FREE.size)
        return mmap.mmap(pipe, _FREE.size)
    finally:
        os.close(pipe)


def _slow_open(file, *args, **kwargs):  # type: ignore[no-untyped-def]
    _pay(file)
    return _open(file, *args, **kwargs)


def _slow_os_open(path, *args, **kwargs):  # type: ignore[no-untyped-def]
    _pay(path)
    return _os_open(path, *args, **kwargs)


if _FOLDER:
    _OPEN_SECONDS = float(os.environ["SLOW_OPEN_SECONDS"])
    _BYTES_PER_SECOND = float(os.environ["SLOW_BYTES_PER_SECOND"])
    _pipe = _mapped(os.environ["SLOW_PIPE"])
    builtins.open = io.open = _slow_open  # type: ignore[assignment]
    os.open = _slow_os_open  # type: ignore[assignment]
