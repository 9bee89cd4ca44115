"""What a file system may hold after a power cut, from the operations that were done on it.

POSIX promises little: what a file holds is there once the file was fsynced, and a name is there (or gone) once its
folder was. Of everything younger, any part may be there. A rename is one step, and nothing else is.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["create", "mkdir", "write", "truncate", "sync", "sync_folder", "rename", "unlink", "rmdir"]
Tree = dict[str, "bytes | None"]
"""Path -> what the file holds; None for a folder."""
Torn = Literal["all", "nothing", "half", "zeros"]
TORN: tuple[Torn, ...] = ("all", "nothing", "half", "zeros")
# All subsets of so many unsynced changes are tried; of more, a choice.
ALL_SUBSETS_OF = 8
DRAWS = 64


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Paths are relative to the root and use "/". `to` is for "rename"; `offset` for "write" and "truncate"."""

    kind: Kind
    path: str
    to: str = ""
    offset: int = 0
    content: bytes = b""


@dataclass(eq=False)
class _File:
    synced: bytes = b""
    now: bytes = b""

    def after(self, torn: Torn) -> bytes:
        """What may be there: of what was not synced, all, nothing, half, or its length alone."""
        if torn == "all" or self.now == self.synced:
            return self.now
        if torn == "nothing":
            return self.synced
        if torn == "half":
            return self.now[: (len(self.synced) + len(self.now)) // 2]
        return self.synced[: len(self.now)] + bytes(max(0, len(self.now) - len(self.synced)))


@dataclass(eq=False)
class _Change:
    """Names of a folder that change in one step; None: the name goes."""

    names: dict[str, _File | _Folder | None]


@dataclass(eq=False)
class _Folder:
    synced: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)

    def entries(self, without: frozenset[_Change] = frozenset()) -> dict[str, _File | _Folder]:
        found = dict(self.synced)
        for change in self.pending:
            if change in without:
                continue
            for name, node in change.names.items():
                if node is None:
                    found.pop(name, None)
                else:
                    found[name] = node
        return found

    def sync(self) -> None:
        self.synced, self.pending = self.entries(), []


class Disk:
    """Follows operations; `states` gives what a power cut would leave at this moment."""

    def __init__(self) -> None:
        self._root = _Folder()

    def do(self, operation: Operation) -> None:
        getattr(self, f"_{operation.kind}")(operation)

    def tree(self) -> Tree:
        """What is there without a power cut."""
        return _tree(self._root, frozenset(), "all")

    def states(self, draw: random.Random) -> Iterator[Tree]:
        """Each once, as far as they are enumerated; all of them where few changes are unsynced."""
        seen = set()
        for lost in _subsets(list(self._unsynced(self._root)), draw):
            for torn in TORN:
                tree = _tree(self._root, frozenset(lost), torn)
                key = frozenset(tree.items())
                if key not in seen:
                    seen.add(key)
                    yield tree

    def _unsynced(self, folder: _Folder) -> Iterator[_Change]:
        yield from folder.pending
        reachable = [*folder.synced.values(), *(node for change in folder.pending for node in change.names.values())]
        for node in dict.fromkeys(reachable):
            if isinstance(node, _Folder):
                yield from self._unsynced(node)

    def _folder(self, path: str) -> _Folder:
        node: _File | _Folder = self._root
        for name in filter(None, path.split("/")):
            assert isinstance(node, _Folder)
            node = node.entries()[name]
        assert isinstance(node, _Folder)
        return node

    def _split(self, path: str) -> tuple[_Folder, str]:
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name

    def _file(self, path: str) -> _File:
        folder, name = self._split(path)
        node = folder.entries()[name]
        assert isinstance(node, _File)
        return node

    def _change(self, path: str, node: _File | _Folder | None) -> None:
        folder, name = self._split(path)
        folder.pending.append(_Change(names={name: node}))

    def _create(self, operation: Operation) -> None:
        self._change(operation.path, _File())

    def _mkdir(self, operation: Operation) -> None:
        self._change(operation.path, _Folder())

    def _unlink(self, operation: Operation) -> None:
        self._change(operation.path, None)

    _rmdir = _unlink

    def _rename(self, operation: Operation) -> None:
        source, name = self._split(operation.path)
        target, new = self._split(operation.to)
        if source is not target:
            raise NotImplementedError(f"a rename into another folder: {operation.path} to {operation.to}")
        source.pending.append(_Change(names={name: None, new: source.entries()[name]}))

    def _write(self, operation: Operation) -> None:
        file = self._file(operation.path)
        before = file.now.ljust(operation.offset, b"\0")
        end = operation.offset + len(operation.content)
        file.now = before[: operation.offset] + operation.content + before[end:]

    def _truncate(self, operation: Operation) -> None:
        file = self._file(operation.path)
        file.now = file.now[: operation.offset].ljust(operation.offset, b"\0")

    def _sync(self, operation: Operation) -> None:
        file = self._file(operation.path)
        file.synced = file.now

    def _sync_folder(self, operation: Operation) -> None:
        self._folder(operation.path).sync()


def _tree(folder: _Folder, lost: frozenset[_Change], torn: Torn, prefix: str = "") -> Tree:
    found: Tree = {}
    for name, node in folder.entries(lost).items():
        if isinstance(node, _Folder):
            found[prefix + name] = None
            found.update(_tree(node, lost, torn, f"{prefix}{name}/"))
        else:
            found[prefix + name] = node.after(torn)
    return found


def _subsets(changes: Sequence[_Change], draw: random.Random) -> Iterable[Sequence[_Change]]:
    """Sets of changes that are lost."""
    if len(changes) <= ALL_SUBSETS_OF:
        for size in range(len(changes) + 1):
            yield from itertools.combinations(changes, size)
        return
    yield ()
    yield changes
    for index, change in enumerate(changes):
        yield (change,)
        yield [*changes[:index], *changes[index + 1 :]]
        yield changes[index:]
    for _ in range(DRAWS):
        yield [change for change in changes if draw.random() < 0.5]


def power_cuts(operations: Iterable[Operation], draw: random.Random) -> Iterator[tuple[int, Tree]]:
    """(operations done, what is there afterwards), for a cut after any of them."""
    disk = Disk()
    yield from ((0, tree) for tree in disk.states(draw))
    for count, operation in enumerate(operations, 1):
        disk.do(operation)
        yield from ((count, tree) for tree in disk.states(draw))
