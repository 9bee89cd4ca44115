"""Every state that a crash can leave of saves, re-saves and pruning: cut off anywhere, and what was not synced lost."""

from __future__ import annotations

import contextlib
import pathlib
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from sgpu.checkpoint import Checkpointer, CheckpointPolicy
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.testing.powercut import Disk, Operation, Tree, power_cuts

REPOSITORY = pathlib.Path(__file__).parents[2]
ROOT, ACKS = "volume/run/checkpoints", "acks"
# The number of each save is its fingerprint. A second trainer saves a step again, and one twice.
SCRIPT = """
number = 0
for steps in ([1, 2], [2, 3, 3]):
    box = {"w": torch.zeros(300)}
    with Checkpointer(CheckpointPolicy(ROOT, keep_last=1), {"box": box}) as checkpointer:
        for step in steps:
            number += 1
            box["w"].fill_(number)
            checkpointer.save(step)
            checkpointer.wait()
            if rank == 0:
                os.mkdir(f"{os.environ['ACKS']}/{number}")
"""
SAVES = 5


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Operations on the mount; `acknowledged`: (operations so far, number of the save)."""

    operations: list[Operation]
    acknowledged: list[tuple[int, int]]
    folder: pathlib.Path

    def acknowledged_by(self, count: int) -> int:
        return max((number for at, number in self.acknowledged if at <= count), default=0)


@contextlib.contextmanager
def recording(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, pathlib.Path]]:
    """A mount point, and the log of what is done below it; the files lie in `folder`/files."""
    mount, log = folder / "mount", folder / "log"
    for new in (mount, folder / "files"):
        new.mkdir()
    log.touch()
    server = subprocess.Popen(
        [sys.executable, str(REPOSITORY / "tests/checkpoint/recording_mount.py"), str(folder / "files"), str(mount),
         str(log)], env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        (marker := folder / "files" / "marker").touch()
        while not (mount / "marker").exists():
            assert server.poll() is None, "the mount ended"
        marker.unlink()
        yield mount, log
    finally:
        subprocess.run(["fusermount3", "-u", "-z", str(mount)], check=True)
        server.wait(10)


def _operations(log: pathlib.Path) -> Iterator[Operation]:
    with log.open("rb") as file:
        with contextlib.suppress(EOFError):
            while True:
                yield pickle.load(file)


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def recorded(request: pytest.FixtureRequest, tmp_path: pathlib.Path, run_ok: Callable[..., list[str]]) -> Recorded:
    with recording(tmp_path) as (mount, log):
        (mount / ACKS).mkdir()
        run_ok(SCRIPT, request.param, ROOT=str(mount / ROOT), ACKS=str(mount / ACKS))
    operations, acknowledged = [], []
    for operation in _operations(log):
        if not operation.path.startswith(ACKS):
            operations.append(operation)
        elif operation.path != ACKS and operation.kind == "mkdir":
            acknowledged.append((len(operations), int(operation.path.rpartition("/")[2])))
    shutil.rmtree(tmp_path / "files" / ACKS)
    assert [number for _, number in acknowledged] == list(range(1, SAVES + 1))
    return Recorded(operations=operations, acknowledged=acknowledged, folder=tmp_path / "files")


def lay_out(tree: Tree, root: pathlib.Path) -> None:
    for path, content in tree.items():
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)


def newest(root: pathlib.Path) -> int:
    """Number of the newest valid save, 0 for none; its values must be those of one save."""
    live = {"w": torch.zeros(300)}
    with Checkpointer(CheckpointPolicy(), {"box": live}, store=PosixStore(root)) as checkpointer:
        restored = checkpointer.restore()
    (number,) = set(live["w"].tolist())
    assert (restored is None) == (number == 0)
    return int(number)


def save_another(root: pathlib.Path) -> None:
    with Checkpointer(CheckpointPolicy(), {"box": {"w": torch.full((300,), 9.0)}}, store=PosixStore(root)) as another:
        another.save(3)
    assert newest(root) == 9


@pytest.mark.fuse
def test_whatever_a_power_cut_leaves_the_last_acknowledged_is_there(recorded: Recorded) -> None:
    """Of what was not synced, anything may be lost, and files that were not may be empty, cut or zero."""
    disk = Disk()
    for operation in recorded.operations:
        disk.do(operation)
    real = {str(path.relative_to(recorded.folder)): path for path in recorded.folder.rglob("*")}
    assert disk.tree() == {name: path.read_bytes() if path.is_file() else None for name, path in real.items()}
    kinds = {operation.kind for operation in recorded.operations}
    assert kinds >= {"create", "mkdir", "write", "sync", "sync_folder", "rename", "unlink", "rmdir"}
    seen: dict[frozenset[tuple[str, bytes | None]], int] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for count, tree in power_cuts(recorded.operations, random.Random(0)):
            key = frozenset(tree.items())
            if key not in seen:
                root = pathlib.Path(folder) / str(len(seen))
                root.mkdir()
                lay_out(tree, root)
                seen[key] = newest(root / ROOT)
                if len(seen) % 8 == 0:
                    save_another(root / ROOT)
            assert recorded.acknowledged_by(count) <= seen[key], (count, recorded.operations[:count][-3:], sorted(tree))
    assert set(seen.values()) == set(range(SAVES + 1))


def _states(operations: list[Operation]) -> list[Tree]:
    return [tree for _, tree in power_cuts(operations, random.Random(0))]


def test_a_writer_that_does_not_sync_is_found_out() -> None:
    """The model itself: what renames without syncing the file leaves a file of the right name that is not whole."""
    careless = [
        Operation(kind="create", path="aside"),
        Operation(kind="write", path="aside", content=b"whole"),
        Operation(kind="rename", path="aside", to="final"),
        Operation(kind="sync_folder", path=""),
    ]
    found = [tree["final"] for tree in _states(careless) if "final" in tree]
    assert {b"whole", b"", b"wh", bytes(5)} == set(found)
    careful = [*careless[:2], Operation(kind="sync", path="aside"), *careless[2:]]
    assert {tree["final"] for tree in _states(careful) if "final" in tree} == {b"whole"}


def test_names_that_were_not_synced_may_be_there_or_not_in_any_mixture() -> None:
    made = [Operation(kind="mkdir", path="a"), Operation(kind="mkdir", path="b"), Operation(kind="create", path="b/f")]
    names = {tuple(sorted(tree)) for tree in _states(made)}
    assert names == {(), ("a",), ("b",), ("a", "b"), ("b", "b/f"), ("a", "b", "b/f")}
    synced = [*made, Operation(kind="sync_folder", path=""), Operation(kind="sync_folder", path="b")]
    assert {tuple(sorted(tree)) for tree in _states(synced)[-1:]} == {("a", "b", "b/f")}
    gone = [*synced, Operation(kind="unlink", path="b/f"), Operation(kind="rmdir", path="b")]
    assert {tuple(sorted(tree)) for tree in _states(gone)[-3:]} <= {("a",), ("a", "b"), ("a", "b", "b/f")}
