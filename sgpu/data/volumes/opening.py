"""From what a user wrote to the volume behind it."""

from __future__ import annotations

import importlib
import os
import pathlib
from typing import Any

from sgpu.contract.errors import InputError
from sgpu.contract.places import check_place
from sgpu.data.volumes.entry import Volume
from sgpu.data.volumes.folder import FolderVolume


def open_volume(
    url: str | os.PathLike[str], credentials: str | None = None, access: dict[str, Any] | None = None
) -> Volume:
    """The volume at a path or URL.

    Args:
        credentials: for a URL: see `UrlVolume`.
        access: what `access_of` gave in another process.

    Raises:
        VolumeError: it does not exist, is no folder, or its scheme is unknown. (Whether there is anything behind a URL
            is found when it is listed.)
        InputError: it looks like a URL, and is none that can be opened.
    """
    if not isinstance(url, str | os.PathLike) or not os.fspath(url):
        raise InputError(
            f'url must be a folder or a URL, as "/Volumes/main/default/cats" or "s3://bucket/cats"; found {url!r}'
        )
    text = os.fspath(url)
    check_place("url", text)
    scheme, _, rest = text.partition("://")
    if not rest and "://" not in text:
        return FolderVolume(text)
    if scheme in ("file", "local"):
        return FolderVolume(rest)
    # half of what a fetcher for a local folder would load
    remote: Any = importlib.import_module("sgpu.data.volumes.url")
    opened: Volume = remote.UrlVolume(text, credentials, None if access is None else remote.Access(**access))
    return opened


def access_of(volume: Volume) -> dict[str, Any] | None:
    """With which another process of this node can read at once, as plain JSON. Secret: for a pipe to it alone."""
    if isinstance(volume, FolderVolume):
        return None
    opened: Any = volume
    access: Any = opened.access()
    return None if access is None else dict(access._asdict())


def hasten(volume: Volume) -> None:
    """For a process that does not fork from now on: its reads may use what does not live through a fork."""
    if not isinstance(volume, FolderVolume):
        opened: Any = volume
        opened.hasten()


def others_are_quicker(volume: Volume) -> bool:
    """Whether a process that this one has given access to reads with a fraction of the CPU that it takes here."""
    if isinstance(volume, FolderVolume):
        return False
    opened: Any = volume
    return bool(opened.others_are_quicker)


def before_forks(volume: Volume) -> None:
    """For a process whose children `hasten`."""
    if not isinstance(volume, FolderVolume):
        opened: Any = volume
        opened.before_forks()


def local_root(url: str) -> pathlib.Path | None:
    """The folder of a local volume, links followed; None for a URL."""
    return None if "://" in url else pathlib.Path(url).resolve()
