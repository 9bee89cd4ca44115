"""Credentials that last for a few requests, and the store that wants them."""

from __future__ import annotations

import os
import urllib.request
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

issued: list[str] = []


def fresh() -> dict[str, Any]:
    """A new token each time."""
    issued.append(f"token {len(issued)}")
    return {"token": issued[-1]}


def stale() -> dict[str, Any]:
    """Always the same one."""
    issued.append("token 0")
    return {"token": "token 0"}


class Guarded(MemoryFileSystem):  # type: ignore[misc]
    """Takes a token for so many requests, then says that it has expired."""

    protocol = "guarded"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    lasts = 3
    used: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, token: str = "", **more: Any) -> None:
        super().__init__(**more)
        self.token = token

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("guarded://", "memory://")))

    def _check(self) -> None:
        self.used[self.token] = self.used.get(self.token, 0) + 1
        if self.used[self.token] > self.lasts:
            raise PermissionError("ExpiredToken: The provided token has expired.")

    def find(self, path: str, **more: Any) -> Any:
        self._check()
        return super().find(path, **more)

    def open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        if mode == "rb":
            self._check()
        return super().open(path, mode, **more)


s3_options: dict[str, Any] = {"client_kwargs": {"region_name": "us-east-1"}}
s3_keys: list[str] = []


def for_s3() -> dict[str, Any]:
    """The next key of those that there are; the last one stays."""
    name = s3_keys.pop(0) if len(s3_keys) > 1 else s3_keys[0]
    return {**s3_options, "key": name, "secret": {"key": "secret"}.get(name, name)}


TOKEN_URL = "TESTS_TOKEN_URL"


def from_server() -> dict[str, Any]:
    """A token that a server issues, as for any process of the node."""
    with urllib.request.urlopen(os.environ[TOKEN_URL]) as reply:
        token = reply.read().decode()
    return {"client_kwargs": {"headers": {"Authorization": f"Bearer {token}"}}}


options: dict[str, Any] = {}


def of_cloud() -> dict[str, Any]:
    """What a test has put there."""
    return dict(options)


HUB_TOKEN = "TESTS_HUB_TOKEN"


def of_hub() -> dict[str, Any]:
    """The token of this moment, as for any process of the node."""
    return {"token": os.environ[HUB_TOKEN]}
