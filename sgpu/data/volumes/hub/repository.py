"""A volume that is a repository on Hugging Face's hub.

The hub's own file system asks for the repository, the folder and the file before it reads any, which the hub limits by
rate, and reads whatever the branch is at then. Here a listing names the commit, and a file is one request for it at
that commit; of a large one all parts but the first are asked of the server that the hub has named.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from sgpu.data.volumes.hub.client import HubClient, NoRevision
from sgpu.data.volumes.hub.place import DEFAULT_REVISION, Place, place_of
from sgpu.data.volumes.hub.tree import names, tree
from sgpu.data.volumes.versions import Answer, Facts

T = TypeVar("T")
_KEPT_LOCATIONS = 256
_CAN_BE_GATED = ("model", "dataset")
_COMMIT = re.compile("[0-9a-f]{40}")


def repository_of(filesystem: Any, root: str) -> HubRepository | None:
    """None for a file system that is not the hub's, or for a bucket there, which has no commits.

    Raises:
        VolumeError: `root` names no repository.
    """
    if not hasattr(filesystem, "resolve_path") or root.partition("/")[0] == "buckets":
        return None
    place = place_of(root)
    return HubRepository(HubClient(filesystem, place), place)


class _Location(NamedTuple):
    """Where the hub said that the bytes of a file are, for a while, and what it told of the file."""

    url: str
    facts: Facts


class HubRepository:
    """For any thread of one process. Methods raise as those of `HubClient`."""

    def __init__(self, client: HubClient, place: Place) -> None:
        self._client, self.place = client, place
        self._gone = set[str]()
        self._locations: dict[str, _Location] = {}

    # ---- what there is

    def find(self) -> tuple[str, dict[str, Facts]]:
        """Where the volume is at the commit that its revision names now, and the files below by their whole names."""
        place, is_commit = self.place, _COMMIT.fullmatch(self.place.revision) is not None
        wanted = ["sha", "gated"] if place.kind in _CAN_BE_GATED else ["sha"]
        # without it all files are named, too; but of other revisions nobody says that what is picked is theirs
        picked = {"expand": wanted} if is_commit or place.revision == DEFAULT_REVISION else {}
        about, _ = self._client.page("revision", place.revision, **picked)
        if about.get("gated"):  # its list is open to all, its files are not
            self._client.check_access()
        commit: str = place.revision if is_commit else about["sha"]
        root, above = place.root(commit), len(place.path(""))
        found = tree(self._client, commit, place.folder)
        return root, {f"{root}/{info['path'][above:]}": _facts(info, commit) for info in found}

    def facts(self, path: str, commit: str) -> Facts:
        """Of a file at a commit. Raises FileNotFoundError."""
        inside = self.place.path(path)
        for info in self._at(commit, lambda revision: self._client.infos(inside, revision)):
            if info["type"] == "file":
                return _facts(info, commit)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def has_folder(self, path: str) -> bool:
        infos = self._client.infos(self.place.path(path), self.place.revision)
        return any(info["type"] == "directory" for info in infos)

    def seen_above(self) -> tuple[str, list[str]]:
        """The nearest folder above the volume's that there is, and the names in it."""
        place = self.place
        while place.folder:
            place = place._replace(folder=place.folder.rpartition("/")[0])
            with contextlib.suppress(FileNotFoundError):
                return place.root(place.revision), names(self._client, place.revision, place.folder)
        return "", []

    # ---- bytes

    def answer(self, path: str, commit: str, start: int | None, stop: int | None, stall_seconds: float) -> Answer:
        """A file at a commit, or `start` to `stop` of it; where that commit is gone, at the volume's revision."""
        limits = {} if start is None or stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        inside = self.place.path(path)
        return self._at(commit, lambda revision: self._brought(inside, revision, limits, stall_seconds))

    def _brought(self, path: str, revision: str, limits: dict[str, str], stall_seconds: float) -> Answer:
        url = self._client.url(path, revision)
        known = self._locations.get(url)
        if known is not None:
            found = self._client.elsewhere(known.url, limits, stall_seconds)
            if found.body is not None:
                _check_range(found.reply, limits)
                return Answer(found.body, known.facts)
            self._locations.pop(url, None)  # it is good for an hour or so
        found = self._client.file(path, revision, limits, stall_seconds)
        _check_range(found.reply, limits)
        facts = _told_with(found.reply)
        if limits and facts is not None and found.is_elsewhere:
            if len(self._locations) >= _KEPT_LOCATIONS:
                self._locations = {}
            self._locations[url] = _Location(str(found.reply.url), facts)
        return Answer(found.body or b"", facts)

    def _at(self, commit: str, ask: Callable[[str], T]) -> T:
        """At a commit; where its history was rewritten, at the revision: what is as it was is told by its hash."""
        if commit and commit not in self._gone:
            try:
                return ask(commit)
            except NoRevision:
                if commit == self.place.revision:
                    raise
                self._gone.add(commit)
        return ask(self.place.revision)


def _facts(info: dict[str, Any], commit: str) -> Facts:
    """The hub tells no time; bits of the hash of what is in the file stand for it, as the version of a cached copy."""
    tag: str = info["lfs"]["oid"] if info.get("lfs") else info["oid"]
    return {
        "type": "file",
        "size": info["size"],
        "etag": tag,
        "mtime": int(tag[:8], 16) & 0x7FFF_FFFF,
        "commit": commit,
    }


def _check_range(reply: Any, limits: dict[str, str]) -> None:
    """Of parts no checksum is known, so that another one would not be noticed."""
    told, wanted = reply.headers.get("content-range"), limits.get("Range", "").replace("=", " ")
    if told and not told.startswith(f"{wanted}/"):
        raise OSError(errno.EIO, f"{told} came instead of {wanted}")


def _told_with(reply: Any) -> Facts | None:
    """What the hub told of the file with a reply, or with the redirection to it."""
    for told in (*reply.history, reply):
        if "x-repo-commit" in told.headers and (tag := told.headers.get("x-linked-etag") or told.headers.get("etag")):
            return {"etag": tag}
    return None
