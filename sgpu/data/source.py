"""A volume as numbered files with local copies: volume, listing and cache in one picklable value. Knows no torch."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sgpu import runtime, settings
from sgpu.contract.errors import DataError, InputError, ListingChangedError
from sgpu.data.caching.cache import Cache
from sgpu.data.caching.private import private_name
from sgpu.data.caching.room import Room
from sgpu.data.caching.root import cache_root
from sgpu.data.measuring.counters import CacheCounts, Counters
from sgpu.data.measuring.work import waiting_for_files
from sgpu.data.processes import living
from sgpu.data.processes.forking import objects_frozen
from sgpu.data.volumes.credentials import Provider, name_of
from sgpu.data.volumes.entry import Entry
from sgpu.data.volumes.finding import list_volume
from sgpu.data.volumes.listing import Listing, difference, shared_listing, way_back, write_listing
from sgpu.data.volumes.opening import local_root, open_volume

_GATHERING_THREADS = 16


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a user said about a volume; checks itself.

    Attributes:
        url: a folder, or a URL that fsspec opens.
        cache_dir: None: "cache" in SGPU_HOME.
        cache_limit_bytes: None: no limit but that of the disk.
        min_free_disk_bytes: None: the setting, or a tenth of the disk.
        paths: exactly these files, all of which must be there; None: those that `pattern` names.
        credentials: "module:function", see `UrlVolume`.
    """

    url: str
    pattern: str = "**/*"
    cache_dir: str | None = None
    cache_limit_bytes: int | None = None
    min_free_disk_bytes: int | None = None
    paths: tuple[str, ...] | None = None
    credentials: str | None = None

    def __post_init__(self) -> None:
        if self.paths is not None:
            object.__setattr__(self, "paths", tuple(self.paths))  # JSON has lists only
        if not isinstance(self.pattern, str):
            raise InputError(f'pattern must be text, relative to the volume, as "**/*.jpg"; found {self.pattern!r}')
        for name in ("cache_limit_bytes", "min_free_disk_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise InputError(f"{name} must be a whole number of bytes, 0 or more, or None; found {value!r}")

    @property
    def root(self) -> pathlib.Path:
        if self.cache_dir is None:
            return settings.home() / "cache"
        return pathlib.Path(self.cache_dir).expanduser().absolute()


def options_of(
    url: str | os.PathLike[str],
    pattern: str,
    cache_dir: str | os.PathLike[str] | None,
    cache_limit_bytes: int | None,
    min_free_disk_bytes: int | None,
    credentials: Provider | str | None = None,
) -> SourceOptions:
    if not isinstance(url, str | os.PathLike):
        raise InputError(f'url must be a folder or a URL, as "/Volumes/main/default/cats"; found {url!r}')
    return SourceOptions(
        url=os.fspath(url), pattern=pattern, cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        cache_limit_bytes=cache_limit_bytes, min_free_disk_bytes=min_free_disk_bytes, credentials=name_of(credentials),
    )  # fmt: skip


class FileInfo(NamedTuple):
    """What a volume tells of a file.

    Attributes:
        path: inside the volume, "/" between folders.
        etag: the store's name of this version, without quotes; where it tells none, made of time and size.
    """

    path: str
    size_bytes: int
    etag: str


class Source:
    """The files of a volume, numbered in the order of their paths.

    Construction lists the volume (once a node and run) and refuses what cannot work. Pickles by its options; where the
    listing is not at hand after that (another node), the volume is listed again and must be the same.

    Raises:
        VolumeError: the volume does not exist, is empty, or cannot be read.
    """

    def __init__(self, options: SourceOptions) -> None:
        self.options = options
        with objects_frozen():
            self._open(expected=None, counted_in=None, access=None)

    def _open(
        self, expected: tuple[str, str] | None, counted_in: pathlib.Path | None, access: dict[str, Any] | None
    ) -> None:
        options = self.options
        self._cold = True
        self.volume = open_volume(options.url, options.credentials, access)
        self.root = cache_root(options.root, self.volume.url)
        least = options.min_free_disk_bytes
        room = Room(
            self.root, options.cache_limit_bytes, least if least is not None else settings.min_free_disk_bytes()
        )
        self.volume_id = _volume_id(self.volume.url)
        named = "\0".join((options.pattern, *(options.paths or ())))
        shelf = room.state / "listings" / f"{self.volume_id}-{_short(named)}"
        if expected is None:
            self.listing = shared_listing(self.volume, self._list, shelf, _scope())
        else:
            self.listing = self._again(shelf, *expected)
        self.counters = Counters(counted_in or room.state / "counters" / living.new_name())
        if counted_in is None:
            weakref.finalize(self, living.remove_own, self.counters.folder, os.getpid())
        self.cache = Cache(self.volume, self.listing, self.root / self.volume_id, room, self.counters)
        room.claim(self.volume_id, self.listing, self, again=expected is not None)

    def _again(self, shelf: pathlib.Path, listing_id: str, file: str) -> Listing:
        if os.path.exists(file):
            return Listing(pathlib.Path(file))
        shelf.mkdir(parents=True, exist_ok=True, mode=0o700)
        listing = write_listing(shelf, self.volume.url, self._list())
        if listing.id != listing_id:
            raise ListingChangedError(
                f"volume {self.volume.url} has other files here ({len(listing)}) than where the data set was made. "
                "Make the data set inside the function that trains, or see that both see the same volume.",
                url=self.volume.url, added=[], removed=[], changed=[],
            )  # fmt: skip
        return listing

    def _list(self) -> list[Entry]:
        return list_volume(self.volume, self.options.pattern, self.options.paths)

    def __len__(self) -> int:
        return len(self.listing)

    def info(self, number: int) -> FileInfo:
        entry = self.listing.entry(number)
        return FileInfo(entry.path, entry.size_bytes, entry.etag or f"{entry.stamp:x}-{entry.size_bytes:x}")

    def obtain(self, number: int, then: Sequence[int] = ()) -> str:
        """A local path.

        Args:
            then: where this file is the first that this process waits for, these come at the same time. (Later a
                fetcher is ahead; while it starts, one file after the other would cost a latency each.)
        """
        path = self.cache.at_hand(number)
        if path is not None:
            return path
        began = time.perf_counter()
        try:
            if then and self.waits_first(number):
                self._gather(then)
            return self.cache.obtain(number)
        finally:
            waiting_for_files.add_since(began)

    @property
    def is_cold(self) -> bool:
        """Whether this process has not waited for a file yet."""
        return self._cold

    def waits_first(self, number: int) -> bool:
        """Whether this file is missing, as the first that this process has to wait for. True once a process."""
        if not self._cold or self.cache.has(number):
            return False
        self._cold = False
        return True

    def _gather(self, numbers: Sequence[int]) -> None:
        pool = ThreadPoolExecutor(min(_GATHERING_THREADS, len(numbers)))
        for number in numbers:
            pool.submit(self._bring, number)
        pool.shutdown(wait=False)

    def _bring(self, number: int) -> None:
        with contextlib.suppress(DataError, OSError):  # who obtains the file meets the same
            self.cache.prefetch(number)

    def soon(self, number: int) -> None:
        """Brings a file here in the background, if it is not."""
        if not self.cache.has(number):
            threading.Thread(target=self._bring, args=(number,), daemon=True).start()

    def counts(self) -> CacheCounts:
        return self.counters.total()

    def relative_path(self, local: str | os.PathLike[str]) -> str:
        """The path inside the volume of a local path that this source gave.

        Raises:
            InputError: it gave no such path.
        """
        path = os.fspath(local)
        for above in (str(self.cache.folder), self.volume.url):
            if path.startswith(above + "/"):
                return path[len(above) + 1 :]
        name = private_name(path)
        if name is None:
            raise InputError(f"{path} is no file of volume {self.volume.url}; expected a path that its data set gave")
        return name

    def check_listing(self, state: dict[str, Any]) -> None:
        """Refuses a state that was made with another listing of the volume.

        Raises:
            ListingChangedError: it names what was added, removed and changed, where the old listing is still here.
        """
        then = state.get("listing")
        if then is None or then["id"] == self.listing.id:
            return
        old = self.listing.file.parent / f"{then['id']}.listing"
        found = difference(Listing(old), self.listing) if old.exists() else None
        what = found.text() if found else f"{then['files']} files of {then['bytes']} bytes then"
        raise ListingChangedError(
            f"volume {self.volume.url} is not the one that the state was made with: {what}; {len(self)} files of "
            f"{self.listing.total_bytes} bytes now. {way_back(then)}, or start a new epoch without this state.",
            url=self.volume.url, added=found.added if found else [], removed=found.removed if found else [],
            changed=found.changed if found else [],
        )  # fmt: skip

    def listing_state(self) -> dict[str, Any]:
        return self.listing.state()

    def description(self) -> dict[str, Any]:
        """What another process of this node needs to open the same source (plain JSON)."""
        return {
            "options": asdict(self.options), "listing": [self.listing.id, str(self.listing.file)],
            "counters": str(self.counters.folder), "root": str(self.root),
        }  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        return self.description()

    def __setstate__(self, told: dict[str, Any], access: dict[str, Any] | None = None) -> None:
        self.options = SourceOptions(**told["options"])
        same_node = os.path.exists(told["counters"]) or os.path.exists(told["listing"][1])
        counted_in = pathlib.Path(told["counters"]) if same_node else None
        self._open((told["listing"][0], told["listing"][1]), counted_in, access)

    @classmethod
    def from_description(cls, told: dict[str, Any], access: dict[str, Any] | None) -> Source:
        """
        Args:
            access: what `access_of` gave for its volume, on this node; None: to be found here.
        """
        source = cls.__new__(cls)
        source.__setstate__(told, access)
        return source


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()


def _volume_id(url: str) -> str:
    root = local_root(url)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", url.rstrip("/").rpartition("/")[2])[:40].strip("-") or "volume"
    return f"{name}-{_short(str(root) if root is not None else url)}"


def _scope() -> str | None:
    """Names the run, where several processes belong to one; they must see the same listing."""
    run = settings.run_dir()
    if run is not None:
        return str(run)
    if runtime.world_size() == 1:
        return None
    parent = living.name_of(os.getppid())
    return f"{parent} {settings.master_address()}"
