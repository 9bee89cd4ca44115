"""The file system behind a URL, one a process, whose credentials are renewed when the store refuses them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import fsspec

from sgpu.contract.errors import VolumeError
from sgpu.data.volumes.credentials import is_refused, provider_of

T = TypeVar("T")
_EXTRAS = {"s3": ("s3", "s3a"), "gcs": ("gs", "gcs"), "azure": ("abfs", "abfss", "az", "adl")}


class _Opened(NamedTuple):
    """A file system of one process. `renewed`: how often the store has refused before."""

    pid: int
    filesystem: Any
    root: str
    renewed: int


class Connection:
    """Asks a store. Any thread, and any process after a fork, may call `asked`.

    Args:
        credentials: "module:function", which gives fsspec's storage options; asked at the beginning, and again when the
            store refuses. None: the usual means of each store, looked up again then.
    """

    def __init__(self, url: str, credentials: str | None) -> None:
        self.url, self.credentials = url, credentials
        self._opened: _Opened | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> tuple[str, str | None]:
        return self.url, self.credentials

    def __setstate__(self, told: tuple[str, str | None]) -> None:
        self.__init__(*told)  # type: ignore[misc]

    def asked(self, call: Callable[[Any, str], T]) -> T:
        """What the store answers to `call(file system, root)`; where it refuses the credentials, again with new ones.

        Those that another thread looked up may have expired in their turn; only new ones of this call's own, refused
        at once, are an error.

        Raises:
            PermissionError: the store refuses also those.
        """
        opened, own = self._open(), False
        while True:
            try:
                return call(opened.filesystem, opened.root)
            except Exception as problem:
                if not is_refused(problem):
                    raise
                if own:
                    raise PermissionError(
                        errno.EACCES,
                        f"the store refuses these credentials, and also those that were looked up anew ({problem}); "
                        "renew them, or name a function that does (credentials=)",
                    ) from problem
            opened, own = self._renew(opened)

    def _open(self) -> _Opened:
        """The file system of this process; fsspec's are not to be shared over a fork."""
        if self._opened is None or self._opened.pid != os.getpid():
            self._lock = threading.Lock()  # a fork may have copied one that is held
            self._opened = self._connect(0)
        return self._opened

    def _renew(self, refused: _Opened) -> tuple[_Opened, bool]:
        """The newest connection, and whether it was made here."""
        with self._lock:
            now = self._opened
            if now is not None and now is not refused:  # another thread was faster
                return now, False
            self._opened = self._connect(refused.renewed + 1)
            return self._opened, True

    def _connect(self, renewed: int) -> _Opened:
        options = {} if self.credentials is None else provider_of(self.credentials)()
        try:
            filesystem, root = fsspec.core.url_to_fs(
                self.url, **options, **({"skip_instance_cache": True} if renewed else {})
            )
        except (ImportError, ValueError) as problem:
            scheme = self.url.partition("://")[0]
            extra = next((f'"sgpu[{name}]"' for name, schemes in _EXTRAS.items() if scheme in schemes), "s3fs or gcsfs")
            raise VolumeError(
                f"volume {self.url} cannot be opened: {problem}. For {scheme}:// install the fsspec package "
                f"that serves it, as with pip install {extra}.",
                url=self.url,
            ) from problem
        return _Opened(os.getpid(), filesystem, root.rstrip("/"), renewed)
