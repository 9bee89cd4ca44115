"""Any store that fsspec reaches: whole files in one upload, retried, and their size checked afterwards."""

from __future__ import annotations

import errno
import inspect
import pathlib
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem, sync
from fsspec.exceptions import FSTimeoutError

from sgpu.checkpoint.stores.store import CHUNK_BYTES, Observe, pieces
from sgpu.contract.errors import CheckpointError

ATTEMPTS = 5
FIRST_WAIT_SECONDS = 0.2
# An operation that failed is not tried again after so long. The client libraries retry besides, on their own.
PATIENCE_SECONDS = 10.0
FEW_FILES = 20
IN_MEMORY_BYTES = 64 * 2**20
# An operation that takes longer than this, and its bytes at this rate, has stalled: it is given up, and tried again.
STALL_SECONDS = 60.0
LEAST_BYTES_PER_SECOND = 20_000.0
# Trying these again cannot help.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_NO_SUCH_RANGE = 416
_Result = TypeVar("_Result")


# Here a folder needs no making, and a bucket that is missing is a mistake, not to be mended by making one.
_WITH_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"})
# Their own errors, where they are not OSErrors already.
_CLIENTS = frozenset({"aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "s3fs", "urllib3"})


def _as_os_error(action: Callable[[], _Result]) -> _Result:
    try:
        return action()
    except OSError as error:
        if str(error).startswith("Forbidden"):  # gcsfs says it in words only
            raise PermissionError(errno.EACCES, str(error)) from error
        raise
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENTS and not isinstance(error, TimeoutError):
            raise
        code = getattr(error, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
        told = f"{type(error).__name__}: {error}"
        if code in (401, 403):
            raise PermissionError(errno.EACCES, told) from error
        raise OSError(errno.EINVAL if code == _NO_SUCH_RANGE else errno.EIO, told) from error


class FsspecStore:
    """Files under a URL. A `put` is one upload of the whole content, so that no half of a file is ever visible on an
    object store; on file systems whose uploads are not atomic, sizes and checksums in the manifest reveal a torn one.
    """

    def __init__(
        self,
        url: str,
        *,
        attempts: int = ATTEMPTS,
        stall_seconds: float = STALL_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        self._attempts = attempts
        self._stall_seconds = stall_seconds
        self._sleep = sleep
        self._made: set[str] = set()
        try:
            self._connect(afresh=False)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"checkpoints at {url}: {error}. Install the package for this protocol "
                '(for example pip install "sgpu[s3]"), or give a path.',
                path=url,
            ) from error

    @property
    def local_root(self) -> pathlib.Path | None:
        return None

    def _path(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}".rstrip("/")

    def _retry(self, action: Callable[[], _Result]) -> _Result:
        """Failures of the client libraries become OSErrors; credentials that expired are looked up anew, once.

        A try may take as long as the file takes; it is only the next one that is not begun after PATIENCE_SECONDS. What
        stalls is tried twice.
        """
        renewed = stalled = False
        deadline = time.monotonic() + PATIENCE_SECONDS
        for attempt in range(self._attempts):
            try:
                return _as_os_error(action)
            except PermissionError as error:
                if not self._has_buckets:
                    raise
                if renewed or attempt == self._attempts - 1:
                    raise PermissionError(
                        errno.EACCES,
                        f"{error}. The credentials for {self.url} were looked up anew, and refused again: renew them "
                        "where this process finds them (a file, a role or a process of the provider's; environment "
                        "variables are those that it was started with)",
                    ) from error
                renewed = True
                self._connect(afresh=True)
            except _FINAL:
                raise
            except OSError as error:
                again = not stalled if isinstance(error, TimeoutError) else time.monotonic() <= deadline
                if error.errno == errno.EINVAL or attempt == self._attempts - 1 or not again:
                    raise
                stalled = stalled or isinstance(error, TimeoutError)
                self._sleep(FIRST_WAIT_SECONDS * 2**attempt * (0.5 + random.random()))
        raise AssertionError("unreachable")

    def _connect(self, *, afresh: bool) -> None:
        self._files, self._root = fsspec.core.url_to_fs(self.url, **({"skip_instance_cache": True} if afresh else {}))
        protocols = self._files.protocol
        self._has_buckets = bool(_WITH_BUCKETS & ({protocols} if isinstance(protocols, str) else set(protocols)))
        self._only_new = _only_new(self._files)

    def _call(self, name: str, *arguments: Any, size_bytes: int = 0, **options: Any) -> Any:
        """A method of the file system, given up when it stalls. `size_bytes`: that it moves."""
        if not isinstance(self._files, AsyncFileSystem):
            return getattr(self._files, name)(*arguments, **options)
        seconds = self._stall_seconds + size_bytes / LEAST_BYTES_PER_SECOND
        try:
            return sync(self._files.loop, getattr(self._files, f"_{name}"), *arguments, timeout=seconds, **options)
        except FSTimeoutError as error:
            raise TimeoutError(errno.ETIMEDOUT, f"{self.url}: no answer to {name} within {seconds:.0f} s") from error

    def names(self, folder: str) -> list[str]:
        where = self._path(folder)
        self._files.invalidate_cache()
        try:
            found = self._retry(lambda: self._call("ls", where, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({str(name).rstrip("/").rpartition("/")[2] for name in found if str(name).rstrip("/") != where})

    def sizes(self, folder: str) -> dict[str, int]:
        where = self._path(folder)
        self._files.invalidate_cache()
        try:
            found = self._retry(lambda: self._call("ls", where, detail=True))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return {
            str(entry["name"]).rpartition("/")[2]: int(entry["size"] or 0) for entry in found if entry["type"] == "file"
        }

    def size(self, path: str) -> int | None:
        self._files.invalidate_cache()
        try:
            info: dict[str, Any] = self._retry(lambda: self._call("info", self._path(path)))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(info["size"] or 0) if info.get("type") == "file" else None

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        end = None if length is None else offset + length
        if length == 0:
            return b""
        start = offset or None  # a range of an empty object is refused by some
        try:
            target, size = self._path(path), length or 0
            return bytes(self._retry(lambda: self._call("cat_file", target, start=start, end=end, size_bytes=size)))
        except OSError as error:
            if error.errno == errno.EINVAL and (self.size(path) or 0) <= offset:
                return b""  # it ends before
            raise

    def put(self, path: str, parts: Iterable[memoryview], observe: Observe | None = None) -> int:
        target = self._path(path)
        parent = target.rpartition("/")[0]
        if parent and parent not in self._made and not self._has_buckets:
            self._retry(lambda: self._files.makedirs(parent, exist_ok=True))
            self._made.add(parent)
        with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES) as staged:
            for piece in pieces(parts):
                if observe is not None:
                    observe(piece)
                staged.write(piece)
            size = staged.tell()
            self._retry(lambda: self._upload(staged, size, target))
        found = self.size(path)
        if found != size:
            raise OSError(f"{self.url}/{path} holds {found} bytes after {size} bytes were uploaded")
        return size

    def _upload(self, staged: Any, size: int, target: str) -> None:
        staged.seek(0)
        if size <= IN_MEMORY_BYTES:
            self._call("pipe_file", target, staged.read(), size_bytes=size)
            return
        with tempfile.NamedTemporaryFile(prefix="sgpu-upload-") as file:
            while chunk := staged.read(CHUNK_BYTES):
                file.write(chunk)
            file.flush()
            self._call("put_file", file.name, target, size_bytes=size)

    def create(self, path: str, content: bytes) -> bool:
        if self.size(path) is not None:
            return False
        if self._only_new is None:  # the best that can be had: two at the same moment may both believe that they won
            self.put(path, [memoryview(content)])
            return True
        try:
            self._retry(lambda: self._create(path, content))
        except FileExistsError:
            return False
        return True

    def _create(self, path: str, content: bytes) -> None:
        only_new = self._only_new or {}
        try:
            _as_os_error(lambda: self._call("pipe_file", self._path(path), content, **only_new))
        except OSError as error:
            if self.size(path) is None:
                raise
            raise FileExistsError(path) from error  # somebody's, perhaps ours with its answer lost: not a fresh one

    def delete(self, path: str) -> None:
        try:
            self._retry(lambda: self._call("rm_file", self._path(path)))
        except FileNotFoundError:
            return

    def delete_files(self, paths: Sequence[str]) -> None:
        if len(paths) < FEW_FILES:
            for path in paths:
                self.delete(path)
            return
        inside = set(self.names(paths[0].rpartition("/")[0]))
        there = [self._path(path) for path in paths if path.rpartition("/")[2] in inside]
        try:
            self._retry(lambda: self._call("rm", there))
        except FileNotFoundError:
            return

    def delete_folder(self, folder: str) -> None:
        try:
            self._retry(lambda: self._call("rm", self._path(folder), recursive=True))
        except FileNotFoundError:
            return


def _only_new(files: Any) -> dict[str, Any] | None:
    """What makes an upload fail where the file exists; None where nothing does."""
    known: set[str] = set()
    for upload in (files.pipe_file, getattr(files, "_pipe_file", files.pipe_file)):
        known |= inspect.signature(upload).parameters.keys()
    if "mode" in known:
        return {"mode": "create"}
    return {"overwrite": False} if "overwrite" in known else None
