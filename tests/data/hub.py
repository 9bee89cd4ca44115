"""A hub of Hugging Face on loopback, as its own client asks it, with the servers behind it that hold large files.

What it answers is what was seen of the true one: the client's source (huggingface_hub 2.4: `hf_api`, `hf_file_system`,
`utils/_http`, `utils/_pagination`), the hub's guide to rate limits (huggingface.co/docs/hub/rate-limits), and the
issues 4815 (who is redirected where) and 2457 (what is told of gated repositories) of huggingface/huggingface_hub.

- A file in git is redirected (307) to a URL that names the commit; in a private or gated repository, and if it is
  empty, it comes at once. A file in LFS is redirected (302) to a signed URL of another origin, which lasts a while; its
  SHA-256 and the commit come with the redirection only, and the other server tells an ETag of its own.
- Who is nobody gets 401 for what is private or does not exist, who has a token 404. The tree of a gated repository is
  open, its files are not.
- Lists of files come in pages that a `Link` names.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

from tests.data.hub_repository import LARGE, Repository, etag, listed

Fault = Literal["cut", "flip", "unavailable", "short", "hold"]
_PLURALS = {"models": "", "datasets": "datasets/", "spaces": "spaces/"}


@dataclass(kw_only=True)
class Hub:
    """What the servers know, and what they were asked.

    Attributes:
        let_in: tokens, and who may see private repositories and read gated ones with them.
        page: files in a page of a list.
        lasts: for how many requests a signed URL is good.
        asked: requests by what they ask for.
        tokens: that came, with each request to the hub; "" for none.
        limit: gives the seconds to wait, instead of an answer to a request of this kind.
        let_go: ends what a fault holds.
        signed: URLs of large files: what is there, and for how many requests.
    """

    url: str = ""
    files_url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    let_in: dict[str, bool] = field(default_factory=dict)
    page: int = 1_000
    lasts: int = 1_000_000
    asked: Counter[str] = field(default_factory=Counter)
    tokens: list[str] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    fired: list[Fault] = field(default_factory=list)
    limit: Callable[[str], int | None] = lambda _: None
    signed: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    let_go: threading.Event = field(default_factory=threading.Event)

    def repository(self, name: str, **more: Any) -> Repository:
        """A new one: "datasets/org/name", or "org/name" for a model."""
        self.repositories[name] = Repository(**more)
        return self.repositories[name]

    def fault(self) -> Fault | None:
        with self.lock:
            if not self.faults:
                return None
            self.fired.append(self.faults.pop(0))
            return self.fired[-1]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, *args: object) -> None:
        """Nothing."""

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, code: str, text: str, **headers: str) -> None:
        codes = {"X_Error_Code": code} if code else {}
        body = json.dumps({"error": text}).encode()
        self.answer(status, body, Content_Type="application/json", X_Error_Message=text, **codes, **headers)

    def serve(self, body: bytes, **headers: str) -> None:
        """A file, or the part of it that was asked for, and whatever fault is due."""
        fault = self.hub.fault()
        if fault == "unavailable":
            self.refuse(503, "", "try again")
            return
        if fault == "hold":
            self.hub.let_go.wait()
        status, asked = 200, self.headers.get("Range")
        if asked is not None:
            first, last = (int(text) for text in asked.removeprefix("bytes=").split("-"))
            headers["Content_Range"] = f"bytes {first}-{last}/{len(body)}"
            status, body = 206, body[first : last + 1]
        if fault == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        elif fault == "short":
            body = body[:-1]
        if fault != "cut":
            self.answer(status, body, **headers)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2])
        self.close_connection = True


class _Large(_Handler):
    """Files in LFS, to who has a URL of theirs."""

    def do_GET(self) -> None:
        assert "Authorization" not in self.headers, "a token has left the hub"
        hub = self.hub
        with hub.lock:
            hub.asked["large"] += 1
            body, left = hub.signed.get(self.path, (b"", 0))
            hub.signed[self.path] = body, left - 1
        if left > 0:
            self.serve(body, ETag=f'"{hashlib.sha256(self.path.encode()).hexdigest()}"')
        else:
            self.answer(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")


class _Small(_Handler):
    """The hub."""

    def do_GET(self) -> None:
        hub, (_, _, path, query, _) = self.hub, urlsplit(self.path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        api = path.startswith("/api/")
        if path == "/api/agent-harnesses":  # the client's own
            self.answer(404)
            return
        kind = next((part for part in ("tree", "resolve-cache", "resolve", "paths-info", "auth-check", "revision")
                     if f"/{part}/" in f"{path}/"), "info")  # fmt: skip
        with hub.lock:
            hub.asked[kind] += 1
            hub.tokens.append(token)
            seconds = hub.limit(kind)
        if seconds is not None:
            self.refuse(
                429, "", "We had to rate limit you", Retry_After=str(seconds),
                RateLimit=f'"{"api" if api else "resolvers"}";r=0;t={seconds}',
                RateLimit_Policy='"fixed window";"api";q=500;w=300',
            )  # fmt: skip
            return
        if token and token not in hub.let_in:
            self.refuse(401, "", "Invalid credentials in Authorization header")
            return
        name, rest = self._named(path)
        repository = hub.repositories.get(name)
        allowed = hub.let_in.get(token, False)
        if repository is None or (repository.private and not allowed):
            self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif kind in ("resolve", "resolve-cache", "auth-check") and repository.gated and not allowed:
            where = f"Access to {name} is restricted"
            self.refuse(403 if token else 401, "GatedRepo", f"{where} and you are not in the authorized list.")
        elif kind == "auth-check":
            self.answer(200, b"OK")
        else:
            self._serve(name, repository, kind, rest, parse_qs(query))

    do_POST = do_GET

    @staticmethod
    def _named(path: str) -> tuple[str, list[str]]:
        """The repository that a path is about, and the rest of the path, whose slashes may be quoted."""
        parts = path.removeprefix("/").split("/")
        if parts[0] == "api":
            plural, *parts = parts[2:] if parts[1] == "resolve-cache" else parts[1:]
        else:
            plural = parts.pop(0) if parts[0] in _PLURALS else "models"
        return _PLURALS[plural] + "/".join(parts[:2]), [unquote(part) for part in parts[2:]]

    def _serve(
        self, name: str, repository: Repository, kind: str, rest: list[str], query: dict[str, list[str]]
    ) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        asked = rest if kind == "resolve-cache" else rest[1:]
        revision = asked[0] if asked else "main"
        commit = repository.branches.get(revision, revision)
        files = repository.commits.get(commit)
        if files is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif kind in ("info", "revision"):
            facts = {"id": name.removeprefix("datasets/"), "sha": commit, "private": repository.private,
                     "gated": "auto" if repository.gated else False, "tags": [], "downloads": 0, "likes": 0,
                     "siblings": [{"rfilename": path} for path in files]}  # fmt: skip
            wanted = query.get("expand")
            if wanted is not None:  # of which revision that is nobody says
                facts["sha"] = repository.branches["main"]
            found = facts if wanted is None else {key: facts[key] for key in ("id", *wanted)}
            self._json(found)
        elif kind == "tree":
            self._tree(files, "/".join(asked[1:]), query)
        elif kind == "paths-info":
            self._json([entry for entry in listed(files, "") if entry["path"] in parse_qs(body)["paths"]])
        else:
            self._file(name, repository, kind, commit, "/".join(asked[1:]))

    def _json(self, value: Any, **headers: str) -> None:
        self.answer(200, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def _tree(self, files: dict[str, bytes], folder: str, query: dict[str, list[str]]) -> None:
        below = f"{folder}/" if folder else ""
        found = [entry for entry in listed(files, below)
                 if query["recursive"] == ["true"] or "/" not in entry["path"][len(below) :]]  # fmt: skip
        if not found:
            self.refuse(404, "EntryNotFound", f"{folder} does not exist")
            return
        start = int(base64.b64decode(query["cursor"][0])) if "cursor" in query else 0
        stop, headers = start + self.hub.page, {}
        if stop < len(found):
            place, _, _ = self.path.partition("?")
            cursor = quote(base64.b64encode(str(stop).encode()))
            again = f"{self.hub.url}{place}?recursive={query['recursive'][0]}&expand=false&cursor={cursor}"
            headers["Link"] = f'<{again}>; rel="next"'
        self._json(found[start:stop], **headers)

    def _file(self, name: str, repository: Repository, kind: str, commit: str, path: str) -> None:
        body = repository.commits[commit].get(path)
        if body is None:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        facts = {"X_Repo_Commit": commit, "ETag": f'"{etag(path, body)}"'}
        if path.endswith(LARGE) and body:
            signed = f"/{hashlib.sha256(body).hexdigest()}?Signature={len(self.hub.signed)}"
            with self.hub.lock:
                self.hub.signed[signed] = body, self.hub.lasts
            linked = {"X_Linked_ETag": facts.pop("ETag"), "X_Linked_Size": str(len(body))}
            self.answer(302, b"Found", Location=self.hub.files_url + signed, **facts, **linked)
        elif kind == "resolve" and body and not (repository.private or repository.gated):
            plural, _, repo = name.partition("/") if name.count("/") == 2 else ("models", "", name)
            place = f"/api/resolve-cache/{plural}/{repo}/{commit}/{quote(path, safe='')}"
            self.answer(
                307, b"Temporary Redirect", Location=f"{place}?{quote(self.path, safe='')}=&etag={facts['ETag']}"
            )
        else:
            self.serve(body, **facts)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may leave in the middle."""


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub without repositories, and the server of large files beside it."""
    hub = Hub()
    with contextlib.ExitStack() as stack:
        for kind in (_Small, _Large):
            server = stack.enter_context(_Server(("127.0.0.1", 0), type("Handler", (kind,), {"hub": hub})))
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            setattr(hub, "url" if kind is _Small else "files_url", f"http://127.0.0.1:{server.server_port}")
        stack.callback(hub.let_go.set)
        yield hub
