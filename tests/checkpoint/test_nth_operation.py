"""As SQLite's tests do it: the Nth operation of the storage fails, for every N, until none is left to fail.

Of each thing that a trainer does: whatever happens, what can be restored afterwards is one of the states that were
saved, whole, and none older than the last that was acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from sgpu.checkpoint import Checkpointer, CheckpointPolicy
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import CheckpointError
from sgpu.testing.stores import READING, WRITING, Fault, FaultyStore

MOST_OPERATIONS = 120
ALL = READING | WRITING


@dataclass
class State:
    """What a trainer has: a tensor and a counter of its own, both equal to the number of the save."""

    w: dict[str, torch.Tensor] = field(default_factory=lambda: {"w": torch.zeros(100)})
    n: int = 0

    def state_dict(self) -> Any:
        return {"n": self.n}

    def load_state_dict(self, state: Any) -> None:
        self.n = state["n"]

    def become(self, number: int) -> None:
        self.w["w"].fill_(number)
        self.n = number

    def number(self) -> int:
        """0: untouched. Fails on a mixture."""
        (found,) = set(self.w["w"].tolist())
        return int(found)

    def checkpointer(self, store: Store, **policy: Any) -> Checkpointer:
        return Checkpointer(CheckpointPolicy(**policy), {"box": self.w}, per_rank={"own": self}, store=store)


def save(store: Store, step: int, number: int, **policy: Any) -> None:
    state = State()
    with state.checkpointer(store, **policy) as checkpointer:
        state.become(number)
        checkpointer.save(step)


def restore(store: Store) -> int:
    state = State()
    with state.checkpointer(store) as checkpointer:
        try:
            checkpointer.restore()
        except CheckpointError:
            assert state.number() == 0
            raise
    return state.number()


def save_next(store: Store) -> int:
    save(store, 3, 3, keep_last=10)
    return 3


def save_again(store: Store) -> int:
    save(store, 2, 3, keep_last=10)
    return 3


def save_and_prune(store: Store) -> int:
    save(store, 3, 3, keep_last=1)
    return 3


def go_on(store: Store) -> int:
    """Alone from what two ranks saved, and further."""
    state = State()
    with state.checkpointer(store, keep_last=1) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert (restored.world_size, restored.per_rank_restored, state.number()) == (2, False, 2)
        state.become(3)
        checkpointer.save(3)
    return 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """`act` gives the number of what is newest when it went well."""

    act: Callable[[Store], int]
    counted: frozenset[str]
    ranks: int = 1

    @property
    def faults(self) -> tuple[Fault, ...]:
        return ("error", "full", "short", "lost") if self.counted & WRITING else ("error", "short", "lost")

    def store(self, root: pathlib.Path, number: int, fault: Fault, *, forever: bool = False) -> FaultyStore:
        """The root, where the operation of that number fails."""
        return FaultyStore(
            PosixStore(root), fail_at=number, fault=fault, forever=forever, only=self.counted, remote=True
        )


CASES = {
    "save": Case(act=save_next, counted=WRITING),
    "save, reading": Case(act=save_next, counted=READING),
    "save again": Case(act=save_again, counted=ALL),
    "save and prune": Case(act=save_and_prune, counted=ALL),
    "restore": Case(act=restore, counted=READING),
    "shrink": Case(act=go_on, counted=ALL, ranks=2),
}
WRITING_CASES = {name: replace(case, counted=WRITING) for name, case in CASES.items() if case.counted & WRITING}
TWO_RANKS = """
from sgpu.checkpoint.stores.posix import PosixStore
class Own:
    def state_dict(self): return {"n": self.n}
    def load_state_dict(self, state): self.n = state["n"]
box, own = {"w": torch.zeros(100)}, Own()
with Checkpointer(CheckpointPolicy(), {"box": box}, per_rank={"own": own}, store=PosixStore(pathlib.Path(ROOT))) as c:
    for step in (1, 2):
        box["w"].fill_(step)
        own.n = step
        c.save(step)
        c.wait()
"""


@pytest.fixture(scope="module")
def memory() -> Iterator[pathlib.Path]:
    """A folder in memory: nothing is tried here that a disk would do otherwise."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield pathlib.Path(folder)


@pytest.fixture
def before(memory: pathlib.Path, request: pytest.FixtureRequest) -> Callable[[Case], pathlib.Path]:
    """A root with steps 1 and 2 in it, of as many ranks as the case wants."""

    def make(case: Case) -> pathlib.Path:
        root = memory / f"of-{case.ranks}"
        if not root.exists() and case.ranks == 1:
            for step in (1, 2):
                save(PosixStore(root), step, step)
        elif not root.exists():
            request.getfixturevalue("run_ok")(TWO_RANKS, case.ranks, ROOT=str(root))
        return root

    return make


def newest(root: pathlib.Path, *, torn_record: bool = False) -> int:
    """Number of what is restored; `torn_record`: a commit record that was cut short may be there, seen as damaged."""
    state = State()
    with state.checkpointer(PosixStore(root)) as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.skipped == () or (torn_record and ".metadata" in restored.skipped[0].reason)
    if restored.per_rank_restored:
        assert state.n == state.number()
    return state.number()


@pytest.mark.parametrize("forever", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, case in CASES.items() for fault in case.faults])
def test_whichever_operation_fails(
    name: str, fault: Fault, forever: bool, before: Callable[[Case], pathlib.Path], memory: pathlib.Path
) -> None:
    case = CASES[name]
    found = set()
    for number in range(1, MOST_OPERATIONS):
        root = memory / "tried"
        shutil.copytree(before(case), root)
        store = case.store(root, number, fault, forever=forever)
        told_well: int | None = None
        with contextlib.suppress(CheckpointError):
            told_well = case.act(store)
        after = newest(root, torn_record=fault == "short" and forever)
        shutil.rmtree(root)
        assert after in ((told_well,) if told_well is not None else (2, 3)), (number, store.operations[number - 1])
        if not store.fired:
            break
        found.add((told_well is not None, after))
    assert number > (5 if "reading" in name else 4), "too few operations to be true"
    assert number < MOST_OPERATIONS - 1, "the number of operations does not end"
    assert found


KILLED = """
import importlib.util
told = importlib.util.spec_from_file_location("cases", os.environ["CASES"])
cases = sys.modules["cases"] = importlib.util.module_from_spec(told)
told.loader.exec_module(cases)
for name, case in cases.WRITING_CASES.items():
    for fault in ("crash", "torn"):
        root = pathlib.Path(os.environ[f"BEFORE_{case.ranks}"])
        print(name, fault, cases.kill_at_each(case, root, fault), flush=True)
"""


def kill_at_each(case: Case, before: pathlib.Path, fault: Fault) -> int:
    """A process of its own does it, and is killed at its Nth operation; how many there are."""
    for number in range(1, MOST_OPERATIONS):
        root = before.with_name("killed")
        shutil.copytree(before, root)
        pid = os.fork()
        if pid == 0:
            try:
                case.act(case.store(root, number, fault))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        after = newest(root, torn_record=fault == "torn")
        shutil.rmtree(root)
        if status == 0:
            assert number > 4
            return number - 1
        assert status == signal.SIGKILL
        assert after in (2, 3)
    raise AssertionError("the number of operations does not end")


def test_whichever_operation_a_trainer_is_killed_at(
    before: Callable[[Case], pathlib.Path], run_ok: Callable[..., list[str]]
) -> None:
    roots = {f"BEFORE_{case.ranks}": str(before(case)) for case in WRITING_CASES.values()}
    (out,) = run_ok(KILLED, CASES=__file__, **roots)
    assert len(out.splitlines()) == 2 * len(WRITING_CASES)
