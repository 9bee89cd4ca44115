"""The file system behind a URL, one a process, whose credentials are renewed when the store refuses them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import fsspec

from sgpu.contract.errors import DataError, VolumeError
from sgpu.data.processes.forking import anew_in_forks
from sgpu.data.volumes.access import access_now, access_of, is_plain
from sgpu.data.volumes.credentials import is_refused, provider_of
from sgpu.data.volumes.entry import Entry
from sgpu.data.volumes.hub.repository import HubRepository, repository_of
from sgpu.data.volumes.quick_s3 import Access, QuickS3, reader_of
from sgpu.data.volumes.stores import answer_of, facts_of, files_below, seen_above, why_nothing
from sgpu.data.volumes.versions import Answer, Facts

T = TypeVar("T")
_EXTRAS = {"s3": ("s3", "s3a"), "gcs": ("gs", "gcs"), "azure": ("abfs", "abfss", "az", "adl"), "hf": ("hf",)}


class _Opened(NamedTuple):
    """
    Attributes:
        renewed: how often the store has refused before.
        quick: asked first for bytes.
        hub: where it is a repository, asked instead of the file system.
    """

    filesystem: Any
    root: str
    renewed: int
    quick: QuickS3 | None
    hub: HubRepository | None


class Connection:
    """Asks a store. Any thread, and any process after a fork, may call `asked`.

    Args:
        credentials: "module:function", which gives fsspec's storage options; asked at the beginning, and again when the
            store refuses. None: the usual means of each store, looked up again then.
    """

    def __init__(self, url: str, credentials: str | None) -> None:
        self.url, self.credentials = url, credentials
        self._stall_seconds: float | None = None  # once it hastens
        self._opened: _Opened | None = None
        self._of_parents: list[_Opened | None] = []
        self._lock = threading.Lock()
        anew_in_forks(self)

    def begin_anew(self) -> None:
        """After a fork: fsspec's file systems are not to be shared over it, and a lock may have been held."""
        self._of_parents.append(self._opened)  # one that goes closes its connections, which the parent still has
        self._opened, self._lock = None, threading.Lock()

    def hasten(self, stall_seconds: float) -> None:
        """See `UrlVolume.hasten`."""
        self._stall_seconds = stall_seconds
        if self._opened is not None:
            self._opened = self._opened._replace(quick=self._quick_of(self._opened.filesystem, self._opened.root))

    @property
    def quick(self) -> QuickS3 | None:
        return None if self._opened is None else self._opened.quick

    def access(self) -> Access | None:
        """See `access_of`."""
        return self.asked(access_of)

    def files(self) -> tuple[str, dict[str, Facts]]:
        """Where the volume is in its store, and what is below by its whole name. Raises as `asked` does."""

        def look(opened: _Opened) -> tuple[str, dict[str, Facts]]:
            if opened.hub is not None:
                return opened.hub.find()
            return opened.root, files_below(opened.filesystem, opened.root)

        return self._asked(look)

    def has_folder(self, path: str) -> bool:
        """Whether there is anything below `path`. Raises as `asked` does."""

        def look(opened: _Opened) -> bool:
            if opened.hub is not None:
                return opened.hub.has_folder(path)
            return bool(opened.filesystem.isdir(f"{opened.root}/{path}"))

        return self._asked(look)

    def facts(self, entry: Entry) -> Facts:
        """What the store tells of a file now. Raises as `asked` does."""

        def look(opened: _Opened) -> Facts:
            if opened.hub is not None:
                return opened.hub.facts(entry.path, entry.commit)
            return facts_of(opened.filesystem, f"{opened.root}/{entry.path}")

        return self._asked(look)

    def why_nothing(self) -> str:
        """See the function of this name. Raises as `asked` does."""
        return self.asked(why_nothing)

    def seen_above(self) -> tuple[str, list[str]]:
        """See the function of this name."""
        return self._asked(
            lambda opened: seen_above(opened.filesystem, opened.root) if opened.hub is None else opened.hub.seen_above()
        )

    def answer(self, entry: Entry, start: int | None, stop: int | None, stall_seconds: float) -> Answer:
        """A file of the volume, or `start` to `stop` of it. Raises as `asked` does."""

        path = entry.path

        def bring(opened: _Opened) -> Answer:
            if opened.hub is not None:
                return opened.hub.answer(path, entry.commit, start, stop, stall_seconds)
            quickly = None if opened.quick is None else opened.quick.ask(path, start, stop)
            filesystem, name = opened.filesystem, f"{opened.root}/{path}"
            if quickly is not None:
                return quickly
            if not filesystem.async_impl:
                with filesystem.open(name, "rb", cache_type="none") as file:
                    file.seek(start or 0)
                    return Answer(file.read(-1 if start is None or stop is None else stop - start), None)
            answer: Answer = fsspec.asyn.sync(
                filesystem.loop, answer_of, filesystem, name, start, stop, timeout=stall_seconds
            )
            return answer

        return self._asked(bring)

    def open(self) -> None:
        """Raises VolumeError or InputError where nothing opens such URLs. Asks the store nothing."""
        self._open()

    def asked(self, call: Callable[[Any, str], T]) -> T:
        """What the store answers to `call(file system, root)`; where it refuses the credentials, again with new ones.

        Those that another thread looked up may have expired in their turn; only new ones of this call's own, refused
        at once, are an error.

        Raises:
            PermissionError: the store refuses also those.
        """
        return self._asked(lambda opened: call(opened.filesystem, opened.root))

    def _asked(self, call: Callable[[_Opened], T]) -> T:
        opened, own = self._open(), False
        while True:
            try:
                return call(opened)
            except Exception as problem:
                if isinstance(problem, DataError) or not is_refused(problem):
                    raise
                if own:
                    raise PermissionError(
                        errno.EACCES,
                        f"the store refuses these credentials, and also those that were looked up anew ({problem}); "
                        "renew them, or name a function that does (credentials=)",
                    ) from problem
            opened, own = self._renew(opened)

    def _open(self) -> _Opened:
        with self._lock:
            if self._opened is None:
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
        root = root.rstrip("/")
        return _Opened(filesystem, root, renewed, self._quick_of(filesystem, root), repository_of(filesystem, root))

    def _quick_of(self, filesystem: Any, root: str) -> QuickS3 | None:
        if self._stall_seconds is None or not is_plain(filesystem):
            return None
        return reader_of(None, partial(access_now, filesystem, root), self._stall_seconds)
