"""A repository on Hugging Face's hub, asked by its own client.

Its file system asks for the repository, the folder and the file before it reads any, which the hub limits by rate, and
reads whatever the branch is at then. Here a listing names the commit, and a file is one request for it at that commit;
of a large one all parts but the first are asked of the server that the hub has named.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from sgpu.contract.errors import VolumeError
from sgpu.data.volumes.hub_limits import Limits
from sgpu.data.volumes.hub_place import Place, place_of
from sgpu.data.volumes.versions import Answer, Facts

T = TypeVar("T")
_KEPT_LOCATIONS = 256
_TRIES = 5  # of what is no file: who reads files tries again
_TELLS_LIST = ("model", "dataset")  # kinds of repositories that can be gated


def repository_of(filesystem: Any, root: str) -> HubRepository | None:
    """None for a file system that is not the hub's, or for a bucket there, which has no commits.

    Raises:
        VolumeError: `root` names no repository.
    """
    if not hasattr(filesystem, "resolve_path") or root.partition("/")[0] == "buckets":
        return None
    return HubRepository(filesystem, place_of(root))


class _Location(NamedTuple):
    """Where the hub said that the bytes of a file are, for a while, and what it told of the file."""

    url: str
    facts: Facts


class HubRepository:
    """For any thread of one process. Methods raise VolumeError (no other try will help), PermissionError or OSError."""

    def __init__(self, filesystem: Any, place: Place) -> None:
        self._hub: Any = importlib.import_module("huggingface_hub")
        self._filesystem, self.place = filesystem, place
        self._api = self._hub.HfApi(endpoint=filesystem.endpoint, token=filesystem.token, library_name="sgpu")
        self._headers: dict[str, str] = self._hub.utils.build_hf_headers(token=filesystem.token, library_name="sgpu")
        self._plain = {"user-agent": self._headers["user-agent"], "Accept-Encoding": "identity"}
        self._limits = Limits(str(place), self._hub.errors.HTTPError)
        self._gone = set[str]()
        self._locations: dict[str, _Location] = {}
        self._client: Any = None
        self._lock = threading.Lock()

    # ---- what there is

    def find(self) -> tuple[str, dict[str, Facts]]:
        """Where the volume is at the commit that its revision names now, and the files below by their whole names."""
        place, wanted = self.place, ["sha", "gated"] if self.place.kind in _TELLS_LIST else ["sha"]
        about = self._told(
            lambda: self._api.repo_info(place.name, revision=place.revision, repo_type=place.kind, expand=wanted)
        )
        if getattr(about, "gated", None):  # its list is open to all, its files are not
            self._told(lambda: self._api.auth_check(place.name, repo_type=place.kind))
        root = place.root(about.sha)
        self._filesystem.invalidate_cache()
        found = self._told(lambda: self._filesystem.find(root, detail=True, expand_info=False))
        files = ((name, facts) for name, facts in found.items() if facts["type"] == "file")
        return root, {
            name: _facts(facts["size"], facts["lfs"], facts["blob_id"], about.sha) for name, facts in files
        }  # fmt: skip

    def facts(self, path: str, commit: str) -> Facts:
        """Of a file at a commit. Raises FileNotFoundError."""
        for found in self._at(commit, lambda revision: self._infos(path, revision)):
            if hasattr(found, "blob_id"):
                return _facts(found.size, found.lfs, found.blob_id, commit)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def has_folder(self, path: str) -> bool:
        return any(hasattr(found, "tree_id") for found in self._infos(path, self.place.revision))

    def _infos(self, path: str, revision: str) -> list[Any]:
        place = self.place
        found: list[Any] = self._told(
            lambda: self._api.get_paths_info(
                place.name, [place.path(path)], revision=revision, repo_type=place.kind
            )
        )  # fmt: skip
        return found

    def seen_above(self) -> tuple[str, list[str]]:
        """The nearest folder above the volume's that there is, and the names in it."""
        above = self.place.folder
        while above:
            above = above.rpartition("/")[0]
            root = self.place._replace(folder=above).root(self.place.revision)
            with contextlib.suppress(FileNotFoundError):
                return root, [name.rpartition("/")[2] for name in self._names(root)]
        return "", []

    def _names(self, root: str) -> list[str]:
        names: list[str] = self._told(lambda: self._filesystem.ls(root, detail=False))
        return names

    # ---- bytes

    def answer(self, path: str, commit: str, start: int | None, stop: int | None, stall_seconds: float) -> Answer:
        """A file at a commit, or `start` to `stop` of it; where that commit is gone, at the volume's revision."""
        limits = {} if start is None or stop is None else {"Range": f"bytes={start}-{stop - 1}"}
        return self._at(commit, lambda revision: self._brought(path, revision, limits, stall_seconds))

    def _brought(self, path: str, revision: str, limits: dict[str, str], stall_seconds: float) -> Answer:
        place = self.place
        url = self._hub.hf_hub_url(
            place.name, place.path(path), repo_type=place.kind, revision=revision, endpoint=self._filesystem.endpoint
        )
        known = self._locations.get(url)
        if known is not None:
            reply, body = self._get(known.url, {**self._plain, **limits}, stall_seconds)
            if body is not None:
                return Answer(body, known.facts)
            self._locations.pop(url, None)  # it is good for an hour or so
        reply, body = self._told(
            lambda: self._asked(url, {**self._headers, **self._plain, **limits}, stall_seconds), tries=1
        )
        if body is None:
            raise OSError(errno.EIO, f"the server that the hub names for it answers HTTP{reply.status_code}")
        facts = _told_with(reply)
        if limits and facts is not None and self._is_elsewhere(reply):
            if len(self._locations) >= _KEPT_LOCATIONS:
                self._locations = {}
            self._locations[url] = _Location(str(reply.url), facts)
        return Answer(body, facts)

    def _asked(self, url: str, headers: dict[str, str], stall_seconds: float) -> tuple[Any, bytes | None]:
        """Of the hub, whose refusals are raised as its client does."""
        reply, body = self._get(url, headers, stall_seconds)
        if body is None and not self._is_elsewhere(reply):
            self._hub.utils.hf_raise_for_status(reply)
        return reply, body

    def _get(self, url: str, headers: dict[str, str], stall_seconds: float) -> tuple[Any, bytes | None]:
        """The last of the replies, and what came; None: nothing of the file."""
        ends, waits = time.monotonic() + stall_seconds, (stall_seconds, stall_seconds, stall_seconds, None)
        with self._own_client().stream("GET", url, headers=headers, follow_redirects=True, timeout=waits) as reply:
            if reply.status_code not in (200, 206):
                reply.read()
                return reply, None
            pieces = list[bytes]()
            for piece in reply.iter_bytes():
                pieces.append(piece)
                if time.monotonic() > ends:
                    raise TimeoutError(errno.ETIMEDOUT, f"not all of it came in {stall_seconds:.0f} s")
        return reply, b"".join(pieces)

    def _is_elsewhere(self, reply: Any) -> bool:
        return not str(reply.url).startswith(f"{self._filesystem.endpoint}/")

    def _own_client(self) -> Any:
        """Made as the hub's is (see its `set_client_factory`): that one is closed by any failed connection, and in
        each fork, where another thread's lock may be held for ever."""
        with self._lock:
            if self._client is None:
                module: Any = importlib.import_module("huggingface_hub.utils._http")
                self._client = getattr(module, "_GLOBAL_CLIENT_FACTORY", module.default_client_factory)()
                weakref.finalize(self, _close, self._client, os.getpid()).atexit = False
            return self._client

    # ---- refusals

    def _at(self, commit: str, ask: Callable[[str], T]) -> T:
        """At a commit; where its history was rewritten, at the revision: what is as it was is told by its hash."""
        if commit and commit not in self._gone:
            try:
                return ask(commit)
            except _NoRevision:
                if commit == self.place.revision:
                    raise
                self._gone.add(commit)
        return ask(self.place.revision)

    def _told(self, call: Callable[[], T], tries: int = _TRIES) -> T:
        """What the hub answers; a refusal says what to do."""
        try:
            return self._limits.kept(call, tries)
        except self._hub.errors.HfHubHTTPError as problem:
            raise self._as_ours(problem) from problem

    def _as_ours(self, problem: Any) -> Exception:
        errors, status, place = self._hub.errors, problem.response.status_code, self.place
        who = "with this token" if "authorization" in self._headers else "without a token"
        where = f"{place} of {self._filesystem.endpoint}"
        url = f"hf://{place.root(place.revision)}"
        if isinstance(problem, errors.GatedRepoError):
            return VolumeError(
                f"volume {url}: {where} is gated, and its files cannot be read {who}. Ask for access at "
                f"{self._filesystem.endpoint}/{place.page}, and name a token of the account that has it: "
                "HF_TOKEN, or credentials=.",
                url=url,
            )
        unknown = isinstance(problem, errors.RepositoryNotFoundError) or status == 401
        if unknown and (status == 404 or who == "without a token"):
            return VolumeError(
                f"volume {url}: there is no {where} that can be seen {who}. Check its name, and its kind "
                "(hf://datasets/organisation/name, hf://organisation/name for a model); if it is private, name a token "
                "that may read it: HF_TOKEN, or credentials=.",
                url=url,
            )
        if isinstance(problem, errors.RevisionNotFoundError):
            return _NoRevision(f"volume {url}: {where} has no such revision. Check its branch, tag or commit.", url=url)
        if isinstance(problem, errors.EntryNotFoundError):
            return FileNotFoundError(errno.ENOENT, "the hub has no such file at this commit")
        if status in (401, 403):
            return PermissionError(errno.EACCES, f"the hub does not accept the token: {problem.server_message}")
        return OSError(errno.EIO, f"the hub answers HTTP{status}")


class _NoRevision(VolumeError):
    """There is no such branch, tag or commit."""


def _close(client: Any, pid: int) -> None:
    if os.getpid() == pid:
        client.close()


def _facts(size: int, large: Any, blob: str, commit: str) -> Facts:
    """The hub tells no time; bits of the hash of what is in the file stand for it, as the version of a cached copy."""
    tag: str = blob if large is None else large.sha256
    return {"type": "file", "size": size, "etag": tag, "mtime": int(tag[:8], 16) & 0x7FFF_FFFF, "commit": commit}


def _told_with(reply: Any) -> Facts | None:
    """What the hub told of the file with a reply, or with the redirection to it."""
    for told in (*reply.history, reply):
        if "x-repo-commit" in told.headers and (tag := told.headers.get("x-linked-etag") or told.headers.get("etag")):
            return {"etag": tag}
    return None
