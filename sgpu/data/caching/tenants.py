"""Who lives in a node's cache: the listings that living processes use, whose files stay."""

from __future__ import annotations

import os
import pathlib
import weakref
from collections.abc import Iterator, Sequence

from sgpu.contract import atomic
from sgpu.data.caching.eviction import CachedFile
from sgpu.data.processes import living
from sgpu.data.volumes.listing import Listing


def move_in(claims: pathlib.Path, volume: str, listing: Listing, owner: object) -> None:
    """Files of `listing` stay in the cache as long as `owner` and this process live."""
    path = claims / living.new_name()
    atomic.write_json(path, {"volume": volume, "listing": str(listing.file)}, durable=False)
    weakref.finalize(owner, living.remove_own, path, os.getpid())


def live_listings(claims: pathlib.Path) -> dict[str, list[Listing]]:
    """By volume."""
    found: dict[str, dict[str, Listing]] = {}
    for path in claims.iterdir():
        if path.name.startswith(".") or not living.owner_lives(path):
            continue
        told = atomic.read_json(path)
        if told is not None and os.path.exists(told["listing"]):
            found.setdefault(told["volume"], {})[told["listing"]] = Listing(pathlib.Path(told["listing"]))
    return {volume: list(listings.values()) for volume, listings in found.items()}


def cached_files(volume: pathlib.Path, listings: Sequence[Listing]) -> Iterator[CachedFile]:
    """What the cache has of a volume that is used by these listings."""
    for folder, _, names in os.walk(volume):
        for name in names:
            path = os.path.join(folder, name)
            try:
                status = os.stat(path)
            except FileNotFoundError:
                continue
            relative = os.path.relpath(path, volume)
            version = status.st_size, status.st_mtime_ns // 1000
            resident = any(
                (number := listing.find(relative)) is not None
                and (int(listing.sizes[number]), int(listing.stamps[number])) == version
                for listing in listings
            )
            yield CachedFile(path=path, size_bytes=status.st_size, downloaded_ns=status.st_ctime_ns, resident=resident)
