"""Every state that a crash can leave: the operations of saves, re-saves and pruning, cut off anywhere."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from sgpu.checkpoint import Checkpointer, CheckpointPolicy
from sgpu.checkpoint.storage import Observe, PosixStore, Store

Operation = tuple[str, str, bytes]


@dataclass
class Recording:
    """Passes all on and notes what changes something. `acknowledged`: (operations so far, step) when a save was told
    as whole.
    """

    inner: Store
    operations: list[Operation] = field(default_factory=list)
    acknowledged: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url, self.local_root = self.inner.url, self.inner.local_root
        self.names, self.size, self.read = self.inner.names, self.inner.size, self.inner.read

    def put(self, path: str, parts: Iterable[memoryview], observe: Observe | None = None) -> int:
        written = self.inner.put(path, parts, observe)
        self.operations.append(("put", path, self.inner.read(path)))
        return written

    def create(self, path: str, content: bytes) -> bool:
        self.operations.append(("create", path, content))
        return self.inner.create(path, content)

    def delete(self, path: str) -> None:
        self.operations.append(("delete", path, b""))
        self.inner.delete(path)

    def delete_folder(self, folder: str) -> None:
        for name in self.inner.names(folder):  # in whatever order a file system takes them
            self.operations.append(("unlink", f"{folder}/{name}", b""))
        self.inner.delete_folder(folder)


def record(root: pathlib.Path) -> Recording:
    store = Recording(PosixStore(root))
    box = {"w": torch.zeros(300)}
    for steps in ([1, 2], [2, 3, 3]):  # a second trainer, that saves a step again, and one twice
        with Checkpointer(CheckpointPolicy(keep_last=1), {"box": box}, store=store) as checkpointer:
            for step in steps:
                box["w"].fill_(step)
                checkpointer.save(step)
                checkpointer.wait()
                store.acknowledged.append((len(store.operations), step))
    return store


def replay(operations: Iterable[Operation], root: pathlib.Path) -> None:
    store = PosixStore(root)
    for kind, path, content in operations:
        if kind in ("put", "create"):
            store.put(path, [memoryview(content)])
        else:
            store.delete(path)


def newest(root: pathlib.Path) -> int:
    """Step of the newest valid one, 0 for none; its values must be those of that step."""
    live = {"w": torch.zeros(300)}
    with Checkpointer(CheckpointPolicy(), {"box": live}, store=PosixStore(root)) as checkpointer:
        restored = checkpointer.restore()
    if restored is None:
        return 0
    assert set(live["w"].tolist()) == {float(restored.step)}
    assert restored.skipped == ()
    return restored.step


def acknowledged_by(store: Recording, count: int) -> int:
    return max((step for at, step in store.acknowledged if at <= count), default=0)


def test_every_prefix_of_the_operations(tmp_path: pathlib.Path) -> None:
    store = record(tmp_path / "recorded")
    kinds = {kind for kind, *_ in store.operations}
    assert kinds == {"put", "create", "delete", "unlink"}
    found = []
    for count in range(len(store.operations) + 1):
        replay(store.operations[:count], tmp_path / str(count))
        found.append(newest(tmp_path / str(count)))
        assert found[-1] >= acknowledged_by(store, count)
    assert found[0] == 0
    assert found[-1] == 3
    assert found == sorted(found)


def test_removals_in_any_order(tmp_path: pathlib.Path) -> None:
    """Files of a folder that is being removed vanish in any order, some of them not at all."""
    store = record(tmp_path / "recorded")
    tried = 0
    at = 0
    for kind, run in itertools.groupby(store.operations, key=lambda operation: operation[0] == "unlink"):
        removals = list(run)
        if kind:
            before = store.operations[:at]
            for size in range(len(removals)):
                for chosen in itertools.combinations(removals, size):
                    tried += 1
                    root = tmp_path / f"subset{tried}"
                    replay([*before, *chosen], root)
                    assert newest(root) >= acknowledged_by(store, at)
        at += len(removals)
    assert tried > 5


def test_a_file_that_is_being_written_is_cut_anywhere(tmp_path: pathlib.Path) -> None:
    """What POSIX forbids and lesser stores do: the last file is there, but only half of it."""
    store = record(tmp_path / "recorded")
    for count, (kind, path, content) in enumerate(store.operations):
        if kind != "put" or path.endswith(".metadata"):
            continue
        root = tmp_path / f"cut{count}"
        replay([*store.operations[:count], (kind, path, content[: len(content) // 2])], root)
        assert newest(root) >= acknowledged_by(store, count)
