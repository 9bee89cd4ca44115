"""Requests to Hugging Face's hub about one repository, and what its refusals mean."""

from __future__ import annotations

import errno
import importlib
import json
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from sgpu.contract.errors import VolumeError
from sgpu.data.volumes.hub.limits import Limits
from sgpu.data.volumes.hub.place import Place

T = TypeVar("T")
_TRIES = 5  # of what is no file: who reads files tries again
_STALL_SECONDS = 60.0  # for a page of a list


class NoRevision(VolumeError):
    """There is no such branch, tag or commit."""


class Reply(NamedTuple):
    """The last reply to a request.

    Attributes:
        body: None where it is an error.
        is_elsewhere: it is not of the server that was asked.
    """

    reply: Any
    body: bytes | None
    is_elsewhere: bool


class HubClient:
    """For any thread of one process. Methods raise VolumeError (no other try will help), PermissionError or OSError.

    Its connections are its own, made as the hub's package makes its one client (see its `set_client_factory`). That is
    closed under all threads by any connection that fails, and in each fork, where somebody's lock may be held for ever;
    and lists would wait for ever for a server that stalls.
    """

    def __init__(self, filesystem: Any, place: Place) -> None:
        self._hub: Any = importlib.import_module("huggingface_hub")
        self.place, self._endpoint = place, filesystem.endpoint.rstrip("/")
        headers: dict[str, str] = self._hub.utils.build_hf_headers(token=filesystem.token, library_name="sgpu")
        self._plain = {"user-agent": headers["user-agent"], "Accept-Encoding": "identity"}
        self._headers = {**headers, **self._plain}
        self._limits = Limits(str(place), self._hub.errors.HTTPError)
        self._client: Any = None
        self._lock = threading.Lock()

    # ---- requests

    def page(self, *parts: str, **query: str | list[str]) -> tuple[Any, str | None]:
        """What the hub tells about the repository, and where it goes on.

        Args:
            parts: of the path; slashes in them are quoted.
            query: for what is asked.
        """
        return self.page_at(self._about(*parts), query)

    def page_at(self, url: str, query: dict[str, Any] | None = None) -> tuple[Any, str | None]:
        asked = {"params": query} if query else {}
        headers = self._headers if url.startswith(f"{self._endpoint}/") else self._plain  # no other gets a token
        found = self._told(lambda: self._asked("GET", url, headers, _STALL_SECONDS, **asked), _TRIES)
        return _read(found), found.reply.links.get("next", {}).get("url")

    def check_access(self) -> None:
        """Whether the files of a gated repository may be read."""
        url = self._about("auth-check")
        self._told(lambda: self._asked("GET", url, self._headers, _STALL_SECONDS), _TRIES)

    def infos(self, path: str, revision: str) -> list[dict[str, Any]]:
        """Of a file or folder in the repository; empty: there is none."""
        url, data = self._about("paths-info", revision), {"paths": [path], "expand": "false"}
        found = self._told(lambda: self._asked("POST", url, self._headers, _STALL_SECONDS, data=data), _TRIES)
        infos: list[dict[str, Any]] = _read(found)
        return infos

    def file(self, path: str, revision: str, limits: dict[str, str], stall_seconds: float) -> Reply:
        """A file of the repository, or as much as `limits` say. Its body is there."""
        url, headers = self.url(path, revision), {**self._headers, **limits}
        found = self._told(lambda: self._asked("GET", url, headers, stall_seconds), 1)
        if found.body is None:
            raise OSError(errno.EIO, f"the server that the hub names for it answers HTTP{found.reply.status_code}")
        return found

    def elsewhere(self, url: str, limits: dict[str, str], stall_seconds: float) -> Reply:
        """From a server that the hub has named, which gets no token."""
        return self._send("GET", url, {**self._plain, **limits}, stall_seconds)

    def url(self, path: str, revision: str) -> str:
        quoted = quote(path), quote(revision, safe="")
        return f"{self._endpoint}/{self.place.page}/resolve/{quoted[1]}/{quoted[0]}"

    def _about(self, *parts: str) -> str:
        path = "/".join(quote(part, safe="") for part in parts)
        return f"{self._endpoint}/api/{self.place.kind}s/{self.place.name}/{path}"

    def _asked(self, method: str, url: str, headers: dict[str, str], stall_seconds: float, **more: Any) -> Reply:
        """Refusals of the hub are raised as its package does."""
        found = self._send(method, url, headers, stall_seconds, **more)
        if found.body is None and not found.is_elsewhere:
            self._hub.utils.hf_raise_for_status(found.reply)
        return found

    def _send(self, method: str, url: str, headers: dict[str, str], stall_seconds: float, **more: Any) -> Reply:
        ends, waits = time.monotonic() + stall_seconds, (stall_seconds, stall_seconds, stall_seconds, None)
        with self._own().stream(method, url, headers=headers, follow_redirects=True, timeout=waits, **more) as reply:
            first = reply.history[0] if reply.history else reply
            is_elsewhere = _origin(first.url) != _origin(reply.url)
            if reply.status_code not in (200, 206):
                reply.read()  # an error tells its text
                return Reply(reply, None, is_elsewhere)
            pieces = list[bytes]()
            for piece in reply.iter_bytes():
                pieces.append(piece)
                if time.monotonic() > ends:
                    raise TimeoutError(errno.ETIMEDOUT, f"not all of it came in {stall_seconds:.0f} s")
        return Reply(reply, b"".join(pieces), is_elsewhere)

    def _own(self) -> Any:
        with self._lock:
            if self._client is None:
                module: Any = importlib.import_module("huggingface_hub.utils._http")
                self._client = getattr(module, "_GLOBAL_CLIENT_FACTORY", module.default_client_factory)()
                weakref.finalize(self, _close, self._client, os.getpid()).atexit = False
            return self._client

    # ---- refusals

    def _told(self, call: Callable[[], T], tries: int) -> T:
        """What the hub answers; a refusal says what to do."""
        try:
            return self._limits.kept(call, tries)
        except self._hub.errors.HfHubHTTPError as problem:
            raise self._as_ours(problem) from problem

    def _as_ours(self, problem: Any) -> Exception:
        errors, status, place = self._hub.errors, problem.response.status_code, self.place
        who = "with this token" if "authorization" in self._headers else "without a token"
        url, where = f"hf://{place.root(place.revision)}", f"{place} of {self._endpoint}"
        if isinstance(problem, errors.GatedRepoError):
            return VolumeError(
                f"volume {url}: {where} is gated, and its files cannot be read {who}. Ask for access at "
                f"{self._endpoint}/{place.page}, and name a token of the account that has it: HF_TOKEN, or "
                "credentials=.",
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
            return NoRevision(f"volume {url}: {where} has no such revision. Check its branch, tag or commit.", url=url)
        if isinstance(problem, errors.EntryNotFoundError):
            return FileNotFoundError(errno.ENOENT, "the hub has no such file at this commit")
        if status in (401, 403):
            return PermissionError(errno.EACCES, f"the hub does not accept the token: {problem.server_message}")
        return OSError(errno.EIO, f"the hub answers HTTP{status}")


def _read(found: Reply) -> Any:
    try:
        return json.loads(found.body or b"")
    except ValueError as problem:
        raise OSError(errno.EIO, f"no list of the hub came from {found.reply.url.host}: {problem}") from problem


def _origin(url: Any) -> tuple[Any, ...]:
    return url.scheme, url.host, url.port


def _close(client: Any, pid: int) -> None:
    if os.getpid() == pid:
        client.close()
