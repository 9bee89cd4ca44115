"""A repository on a hub of Hugging Face, and how the hub tells of what is in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

LARGE = (".bin", ".parquet")  # are in LFS


@dataclass(kw_only=True)
class Repository:
    """Of any kind, with all of its commits."""

    private: bool = False
    gated: bool = False
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes | None], branch: str = "main") -> str:
        """Adds, replaces and (None) removes files. Returns the commit's name."""
        before = self.commits.get(self.branches.get(branch, ""), {})
        after = {path: body for path, body in {**before, **files}.items() if body is not None}
        name = hashlib.sha1(f"{len(self.commits)} {branch} {sorted(after)}".encode()).hexdigest()
        self.commits[name], self.branches[branch] = after, name
        return name

    def squash(self) -> str:
        """Forgets all commits but what is in the newest one, which gets a new name."""
        files = self.commits[self.branches["main"]]
        self.commits = {name: {} for name in self.commits}
        name = self.commit({**files})
        self.commits = {name: files}
        return name


def git_id(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def etag(path: str, body: bytes) -> str:
    """As the hub tells it of a file."""
    return hashlib.sha256(body).hexdigest() if path.endswith(LARGE) else git_id(body)


def told(path: str, body: bytes) -> dict[str, Any]:
    """A file in a tree."""
    if not path.endswith(LARGE):
        return {"type": "file", "oid": git_id(body), "size": len(body), "path": path}
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{etag(path, body)}\nsize {len(body)}\n".encode()
    large = {"oid": etag(path, body), "size": len(body), "pointerSize": len(pointer)}
    return {"type": "file", "oid": git_id(pointer), "size": len(body), "path": path, "lfs": large, "xetHash": "0" * 64}


def listed(files: dict[str, bytes], below: str) -> Iterator[dict[str, Any]]:
    """Folders and files below a folder, as a tree tells them."""
    folders = {path[:place] for path in files for place in range(len(path)) if path[place] == "/"}
    for path in sorted({*folders, *files}):
        if path.startswith(below):
            oid = hashlib.sha1(path.encode()).hexdigest()
            yield (
                told(path, files[path]) if path in files else {"type": "directory", "oid": oid, "size": 0, "path": path}
            )
