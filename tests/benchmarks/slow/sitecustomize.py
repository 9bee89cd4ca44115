"""Makes one folder slow, for every Python process that finds this file: a mount with a latency and a shared bandwidth.

An open waits for the latency, and then until the file's bytes would have come through a pipe that all processes share.
On with SLOW_FOLDER, SLOW_OPEN_SECONDS, SLOW_BYTES_PER_SECOND and SLOW_PIPE (a file that holds when the pipe is free).
"""

import builtins
import fcntl
import io
import os
import struct
import time

_FOLDER = os.environ.get("SLOW_FOLDER", "")
_open, _os_open = io.open, os.open


def _pay(path: object) -> None:
    if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(_FOLDER + "/"):
        return
    time.sleep(float(os.environ["SLOW_OPEN_SECONDS"]))
    seconds = os.stat(path).st_size / float(os.environ["SLOW_BYTES_PER_SECOND"])
    pipe = _os_open(os.environ["SLOW_PIPE"], os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(pipe, fcntl.LOCK_EX)
        (free,) = struct.unpack("<d", os.pread(pipe, 8, 0) or bytes(8))
        free = max(free, time.monotonic()) + seconds
        os.pwrite(pipe, struct.pack("<d", free), 0)
    finally:
        os.close(pipe)
    time.sleep(max(0.0, free - time.monotonic()))


def _slow_open(file, *args, **kwargs):  # type: ignore[no-untyped-def]
    _pay(file)
    return _open(file, *args, **kwargs)


def _slow_os_open(path, *args, **kwargs):  # type: ignore[no-untyped-def]
    _pay(path)
    return _os_open(path, *args, **kwargs)


if _FOLDER:
    builtins.open = io.open = _slow_open  # type: ignore[assignment]
    os.open = _slow_os_open  # type: ignore[assignment]
