"""Two runs pointed at one folder: the second is refused while the first is alive, and both keep what they have."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, Any

import pytest
import torch

import sgpu
from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy
from sgpu.checkpoint.format import names
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.checkpoint.writing import ownership
from sgpu.checkpoint.writing.ownership import Owner
from sgpu.contract.errors import CheckpointError, CheckpointMismatchError, CheckpointSaveError, InputError
from sgpu.contract.process import ProcessId
from sgpu.contract.rundir import RunDir
from sgpu.contract.status import Status
from sgpu.testing.stores import GateStore

pytestmark = pytest.mark.usefixtures("without_mlflow")
REPOSITORY = pathlib.Path(__file__).parents[2]
# Saves a step for each number that it is told, and says how it went; ends when its input does.
SAVER = """
import sys, torch
torch.set_num_threads(1)
from sgpu.checkpoint import *
from sgpu.contract.errors import CheckpointError
box = {"w": torch.zeros(500)}
try:
    checkpointer = Checkpointer(CheckpointPolicy(sys.argv[1], keep_last=2), {"box": box})
except CheckpointError as error:
    print("REFUSED", error.unrecoverable, error, flush=True)
    raise SystemExit
restored = checkpointer.restore()
print("READY", restored.step if restored else None, flush=True)
for line in sys.stdin:
    box["w"].fill_(int(line))
    checkpointer.save(int(line))
    try:
        checkpointer.wait()
        print("SAVED", line.strip(), flush=True)
    except CheckpointError as error:
        print("FAILED", error.unrecoverable, error, flush=True)
checkpointer.close()
"""


class Saver:
    """A real process that saves when it is told to."""

    def __init__(self, root: pathlib.Path, **environment: str) -> None:
        inherited = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore", **environment}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SAVER, str(root)], env=inherited, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def hears(self) -> str:
        out: IO[str] | None = self.process.stdout
        assert out is not None
        return out.readline().strip()

    def save(self, step: int) -> str:
        assert self.process.stdin is not None
        print(step, file=self.process.stdin, flush=True)
        return self.hears()

    def end(self) -> None:
        self.process.communicate(timeout=60)


@pytest.fixture
def savers(tmp_path: pathlib.Path) -> Iterator[Any]:
    started: list[Saver] = []

    def start(**environment: str) -> Saver:
        started.append(Saver(tmp_path / "root", **environment))
        return started[-1]

    yield start
    for saver in started:
        if saver.process.poll() is None:
            saver.process.kill()
        saver.process.communicate()


def run_folder(tmp_path: pathlib.Path, name: str) -> str:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    return str(folder)


def test_the_second_of_two_live_runs_is_refused_and_the_first_goes_on(savers: Any, tmp_path: pathlib.Path) -> None:
    root = tmp_path / "root"
    first = savers(SGPU_RUN_DIR=run_folder(tmp_path, "run-a"))
    assert first.hears() == "READY None"
    assert first.save(1) == "SAVED 1"
    second = savers(SGPU_RUN_DIR=run_folder(tmp_path, "run-b"))
    said = second.hears()
    assert said.startswith("REFUSED True")
    for part in (str(root), "run run-a", f"process {first.process.pid}", "Give this run a root of its own"):
        assert part in said
    second.end()
    assert first.save(2) == "SAVED 2"
    first.end()
    assert Catalog(root).steps() == [1, 2]
    assert all(Catalog(root).verify(step, deep=True).ok for step in (1, 2))
    third = savers(SGPU_RUN_DIR=run_folder(tmp_path, "run-c"))  # the first has ended, and gave the root back
    assert third.hears() == "READY 2"
    assert third.save(3) == "SAVED 3"


def test_of_two_runs_that_begin_at_the_same_moment_one_goes_on(savers: Any, tmp_path: pathlib.Path) -> None:
    both = [savers(SGPU_RUN_DIR=run_folder(tmp_path, name)) for name in ("run-a", "run-b")]
    said = [saver.hears().split()[0] for saver in both]
    assert sorted(said) == ["READY", "REFUSED"]
    winner = both[said.index("READY")]
    assert winner.save(1) == "SAVED 1"
    assert Catalog(tmp_path / "root").steps() == [1]


def test_a_killed_run_leaves_its_root_to_the_next(savers: Any, tmp_path: pathlib.Path) -> None:
    first = savers()
    assert first.hears() == "READY None"
    assert first.save(1) == "SAVED 1"
    first.process.kill()
    first.process.wait()
    second = savers()
    assert second.hears() == "READY 1"
    assert second.save(2) == "SAVED 2"


def test_a_restart_of_the_same_run_is_no_other_run(savers: Any, tmp_path: pathlib.Path) -> None:
    """Also where its former process is still there."""
    run = run_folder(tmp_path, "run-a")
    first = savers(SGPU_RUN_DIR=run)
    assert first.hears() == "READY None"
    assert first.save(1) == "SAVED 1"
    second = savers(SGPU_RUN_DIR=run)
    assert second.hears() == "READY 1"
    assert second.save(2) == "SAVED 2"
    assert first.save(3).startswith("FAILED True")  # the run goes on elsewhere
    assert Catalog(tmp_path / "root").steps() == [1, 2]


def test_a_new_run_is_refused_before_its_workers_start(savers: Any, tmp_path: pathlib.Path) -> None:
    first = savers(SGPU_RUN_DIR=run_folder(tmp_path, "run-a"))
    assert first.hears() == "READY None"
    root = tmp_path / "root"

    def job() -> None:
        raise AssertionError("it was started")

    train = sgpu.distributed(gpus=1, checkpoints=str(root))(job)
    with pytest.raises(InputError, match=rf"checkpoints='{root}': .* is in use: run run-a, process"):
        train.submit()
    first.end()
    ownership.check_free(root)


def test_what_another_run_left_and_does_not_fit_is_told_by_its_name(savers: Any, tmp_path: pathlib.Path) -> None:
    first = savers(SGPU_RUN_DIR=run_folder(tmp_path, "run-a"))
    assert first.hears() == "READY None"
    assert first.save(1) == "SAVED 1"
    first.end()
    live = {"other": torch.zeros(3)}
    with Checkpointer(CheckpointPolicy(), {"box": live}, store=PosixStore(tmp_path / "root")) as checkpointer:
        with pytest.raises(CheckpointMismatchError, match=r"only in the checkpoint: box\.w\. Run run-a wrote it"):
            checkpointer.restore()
    assert Catalog(tmp_path / "root").verify(1, deep=True).ok


def elsewhere(store: PosixStore, attempt: int, **changes: Any) -> None:
    """Makes a claim one of another machine, where nobody can see whether its process is alive."""
    owner = ownership.read_owner(store, attempt)
    assert owner is not None
    path = pathlib.Path(store.url) / names.claim_name(attempt)
    path.write_bytes(replace(owner, machine="far-away/boot/1", **changes).to_bytes())


def test_a_run_on_another_machine_counts_as_alive_until_it_was_quiet_for_long(tmp_path: pathlib.Path) -> None:
    store = PosixStore(tmp_path)
    assert ownership.claim(store, 0) == 0
    elsewhere(store, 0, run_id="run-a")
    with pytest.raises(CheckpointError, match=r"run run-a, process \d+ on far-away, last seen \d+ s ago"):
        ownership.claim(store, 0)
    assert names.claims(store.names("")) == [0]
    elsewhere(store, 0, run_id="run-a", seen_unix_seconds=time.time() - ownership.QUIET_SECONDS - 1)
    assert ownership.claim(store, 0) == 1
    assert names.claims(store.names("")) == [1]


def test_one_that_was_taken_over_by_mistake_loses_nothing_and_notices(tmp_path: pathlib.Path) -> None:
    """It was only quiet. Its own save under way is not committed, and what both committed before stays."""
    gate = GateStore(PosixStore(tmp_path))
    slow = Checkpointer(CheckpointPolicy(), {"box": {"w": torch.ones(9)}}, store=gate)
    slow.save(5)
    assert gate.reached.wait(30)
    elsewhere(PosixStore(tmp_path), 0, run_id="run-a", seen_unix_seconds=0.0)
    with Checkpointer(
        CheckpointPolicy(keep_last=1), {"box": {"w": torch.ones(9)}}, store=PosixStore(tmp_path)
    ) as other:
        other.save(1)
        other.wait()
        gate.open_gate()
        with pytest.raises(CheckpointSaveError, match=r"another run \(.*\) has taken over") as caught:
            slow.wait()
        assert caught.value.unrecoverable
        other.save(2)
    slow.close()
    assert Catalog(tmp_path).steps() == [2]


def test_what_a_live_run_has_begun_is_not_cleared_by_another(tmp_path: pathlib.Path) -> None:
    """Two in one process (a user's own doing): the save under way is the other's, and alive."""
    gate = GateStore(PosixStore(tmp_path), holds=lambda path: path.endswith("manifest.json"))
    first = Checkpointer(CheckpointPolicy(), {"box": {"w": torch.ones(9)}}, store=gate)
    first.save(5)
    assert gate.reached.wait(30)
    with Checkpointer(CheckpointPolicy(), {"box": {"w": torch.ones(9)}}, store=PosixStore(tmp_path)) as second:
        second.save(1)
    assert (tmp_path / "step-00000005" / ".done-0.json").exists()
    gate.open_gate()
    first.close()
    assert Catalog(tmp_path).steps() == [1, 5]


@pytest.mark.parametrize("content", [b"", b"{}", b"{", b'{"run_id": 1}', b"[]", b"\xff"])
def test_a_claim_that_cannot_be_read_keeps_nobody_out(content: bytes, tmp_path: pathlib.Path) -> None:
    (tmp_path / ".attempt-3").write_bytes(content)
    with Checkpointer(CheckpointPolicy(), {"box": {"w": torch.ones(9)}}, store=PosixStore(tmp_path)) as checkpointer:
        checkpointer.save(1)
    assert Catalog(tmp_path).steps() == [1]
    assert names.claims(os.listdir(tmp_path)) == [4]


def test_a_process_number_that_was_given_away_is_not_believed(tmp_path: pathlib.Path) -> None:
    me = Owner.here(0)
    assert me.alive(time.time())
    assert not replace(me, ended=True).alive(time.time())
    gone = replace(me, process=ProcessId(pid=me.process.pid, started=me.process.started - 1))
    assert not gone.alive(time.time())
    restarted = replace(gone, agent=me.process, run_dir=str(tmp_path))
    assert restarted.alive(time.time())
    Status(state="FAILED", updated=0.0, started=0.0).write(RunDir(tmp_path))
    assert not restarted.alive(time.time())  # its agent only tidies up
    assert json.loads(me.to_bytes())["process"]["pid"] == os.getpid()
