"""Where a volume is on Hugging Face's hub, from its URL. (The hub's own client asks the hub for that.)"""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

from sgpu.contract.errors import VolumeError

DEFAULT_REVISION = "main"
_KINDS = {"datasets": "dataset", "models": "model", "spaces": "space", "kernels": "kernel"}
_WITH_SLASHES = re.compile(r"refs/(?:convert/[\w.-]+|pr/\d+)(?=/|$)")  # the only revisions that need no quoting


class Place(NamedTuple):
    """
    Attributes:
        name: "organisation/name".
        revision: a branch, tag or commit.
        folder: in the repository, without slashes around it; empty: all of it.
    """

    kind: str
    name: str
    revision: str
    folder: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"

    def path(self, inside: str) -> str:
        """Of a file of the volume, in the repository."""
        return f"{self.folder}/{inside}" if self.folder else inside

    @property
    def page(self) -> str:
        """Of the repository, below the hub's address."""
        return self.name if self.kind == "model" else f"{self.kind}s/{self.name}"

    def root(self, revision: str) -> str:
        """The volume at a revision, as the hub's file system names it."""
        return f"{self.page}@{quote(revision, safe='')}/{self.folder}".rstrip("/")


def place_of(root: str) -> Place:
    """From what follows "hf://".

    Raises:
        VolumeError: it names no repository.
    """
    first, _, rest = root.partition("/")
    kind, named = (_KINDS[first], rest) if first in _KINDS else ("model", root)
    organisation, _, more = named.partition("/")
    name, _, folder = more.partition("/")
    revision = DEFAULT_REVISION
    if "@" in name:
        name, _, behind = more.partition("@")
        found = _WITH_SLASHES.match(behind)
        revision = found[0] if found else behind.partition("/")[0]
        folder = behind[len(revision) :].removeprefix("/")
    singular = first in _KINDS.values() and first not in _KINDS
    if not (organisation and name and revision) or singular or "@" in organisation:
        hint = f" Write {first}s/ for {first}/." if singular else ""
        raise VolumeError(
            f"volume hf://{root} names no repository.{hint} Expected hf://datasets/organisation/name, or "
            "hf://organisation/name for a model, then @revision and /folder as you like.",
            url=f"hf://{root}",
        )
    return Place(kind, f"{organisation}/{name}", unquote(revision), folder)
