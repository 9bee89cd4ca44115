"""Storage that refuses: a clear error, what was there before untouched, training going on where asked."""

from __future__ import annotations

import errno
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, VolumeWriter
from sgpu.checkpoint.attempts import Attempts
from sgpu.checkpoint.format import names
from sgpu.checkpoint.restoring.ranks import Ranks
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.checkpoint.writing import commit
from sgpu.contract.errors import (
    CheckpointError,
    CheckpointSaveError,
)
from sgpu.testing.stores import Fault, FaultyStore
from tests.checkpoint.small import box, content, save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
REPOSITORY = pathlib.Path(__file__).parents[2]


# ---- storage that refuses

HEALS_NOT = {
    "ENOSPC": "Free some space", "EDQUOT": "quota of this user", "EROFS": "mounted read-only",
    "EACCES": "may not write there", "ENOTDIR": "a file where a folder should be",
}  # fmt: skip


@pytest.mark.parametrize("name", HEALS_NOT)
def test_what_cannot_heal_says_so_with_path_numbers_and_what_to_do(name: str, tmp_path: pathlib.Path, arm: Any) -> None:
    root = tmp_path / "root"
    save(root, 1, box=box())
    before = content(root)
    fired = arm(f"checkpoint.shard_half=errno:{name}")
    checkpointer = Checkpointer(CheckpointPolicy(str(root)), {"box": box(value=2)})
    checkpointer.save(2)
    with pytest.raises(CheckpointSaveError, match=HEALS_NOT[name]) as caught:
        checkpointer.close()
    error = caught.value
    assert len(fired()) == 1
    assert (error.unrecoverable, error.errno, error.step, error.rank) == (True, getattr(errno, name), 2, 0)
    assert str(root) in error.path
    assert "run.resume()" in str(error)
    if name in ("ENOSPC", "EDQUOT"):
        assert error.needed_bytes > 4000
        assert error.free_bytes > 0
        assert f"{error.needed_bytes:,} bytes were needed" in str(error)
        assert f"bytes are free at {root}" in str(error)
    after = content(root)
    assert {path: after[path] for path in before} == before
    assert Catalog(root).steps() == [1]


def test_what_may_heal_is_worth_another_try(tmp_path: pathlib.Path, arm: Any) -> None:
    arm("checkpoint.shard_half=errno:EIO")
    checkpointer = Checkpointer(CheckpointPolicy(str(tmp_path / "root")), {"box": box()})
    checkpointer.save(1)
    with pytest.raises(CheckpointSaveError) as caught:
        checkpointer.close()
    assert not caught.value.unrecoverable


@pytest.mark.parametrize("place", ["stage", "shard_half"])
def test_training_goes_on_where_the_policy_says_so(place: str, tmp_path: pathlib.Path, arm: Any) -> None:
    root = tmp_path / "root"
    fired = arm(f"checkpoint.{place}#2=errno:ENOSPC")
    state = box()
    with Checkpointer(CheckpointPolicy(str(root), on_error="warn"), {"box": state}) as checkpointer:
        for step in (1, 2, 3):
            state["w"].fill_(step)
            checkpointer.save(step)
            checkpointer.wait()
        reports = checkpointer.poll()
    assert len(fired()) == 1
    assert [(report.step, report.error is None) for report in reports] == [(1, True), (2, False), (3, True)]
    assert "No space left" in str(reports[1].error)
    assert Catalog(root).steps() == [1, 3]


def test_both_ranks_know_that_it_cannot_heal(run_ranks: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    script = """
    from sgpu.contract.errors import CheckpointSaveError
    box = {"v": torch.ones(9), "w": torch.ones(9)}
    checkpointer = Checkpointer(CheckpointPolicy(ROOT), {"box": box}, replicated=["box"])
    checkpointer.save(1)
    try:
        checkpointer.close()
    except CheckpointSaveError as error:
        print(error.rank, error.unrecoverable, error.needed_bytes > 0, "rank 1: [Errno 28]" in str(error))
    """
    log = tmp_path / "fired.log"
    ended = run_ranks(script, 2, SGPU_FAILPOINT="checkpoint.shard_written@1=errno:ENOSPC", SGPU_FAILPOINT_LOG=str(log))
    assert len(log.read_text().splitlines()) == 1
    assert [one.out.strip() for one in ended] == ["1 True True True"] * 2, [one.err for one in ended]


def test_a_disk_too_full_for_words_ends_the_others_waiting_too(tmp_path: pathlib.Path) -> None:
    """The name of an empty file says it."""
    store = FaultyStore(PosixStore(tmp_path), fail_at=1, fault="full", forever=True, only=frozenset({"put"}))
    (tmp_path / "step").mkdir()
    commit.tell_failed(store, "step", 1, "no space", {"unrecoverable": True})
    assert store.fired == 1
    patience = commit.Patience(seconds=lambda: 60.0)
    with pytest.raises(CheckpointSaveError, match="rank 1: its save failed") as caught:
        commit.wait_for(store, "step", lambda found: [1], patience, "its share")
    assert caught.value.rank == 1


def test_a_file_where_the_root_or_its_parent_should_be(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for root in (file, file / "below"):
        with pytest.raises(CheckpointError, match=r"cannot be written to .*file where a folder should be") as caught:
            Checkpointer(CheckpointPolicy(str(root)), {"box": box()})
        assert caught.value.unrecoverable
        assert caught.value.path == str(root)
        with pytest.raises(CheckpointException, match=r"file where a folder should be"):
            dcp.save(box(), storage_writer=VolumeWriter(root))
    assert file.read_text() == "mine"


@pytest.mark.parametrize("fault", ["error", "lost"])
def test_a_disk_that_fails_once_does_not_end_a_run_that_begins(fault: Fault, tmp_path: pathlib.Path) -> None:
    def attempts(*, forever: bool, remote: bool = False) -> tuple[FaultyStore, Callable[[], Attempts]]:
        only = frozenset({"create"})
        store = FaultyStore(PosixStore(tmp_path), fail_at=1, fault=fault, forever=forever, only=only, remote=remote)
        return store, partial(Attempts, store, Ranks(0, 1, 60.0), 0)

    store, begin = attempts(forever=False)
    begun = begin()
    assert store.fired == 1
    assert names.claim_name(begun.number) in store.names("")
    for forever, remote, fired in ((True, False, 2), (False, True, 1)):  # a remote one has been asked again already
        store, begin = attempts(forever=forever, remote=remote)
        with pytest.raises(CheckpointError, match="cannot be written to"):
            begin()
        assert store.fired == fired


def test_a_file_with_the_name_of_a_step_is_left_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "step-00000001").write_text("mine")
    save(tmp_path, 1, box=box())
    assert Catalog(tmp_path).steps() == [1]
    assert (tmp_path / "step-00000001").read_text() == "mine"


# ---- real full, read-only and closed folders

HEAD = """
import os, pathlib, sys, torch
torch.set_num_threads(1)
from sgpu.checkpoint import *
from sgpu.contract.errors import *
ROOT = pathlib.Path(os.environ["ROOT"])
box = {"w": torch.ones(200_000)}
def told(action):
    try:
        action()
    except CheckpointError as error:
        print(error.facts.get("errno"), error.unrecoverable, error.facts.get("needed_bytes", 0) > 800_000,
              0 <= error.facts.get("free_bytes", -1) < 2_000_000, str(ROOT) in str(error.path))
        print(error, file=sys.stderr)
    else:
        print("no error")
"""


def run_mounted(root: pathlib.Path, mount: str, script: str) -> list[str]:
    """Runs a script in a mount namespace of its own, after a shell command that mounts something at $ROOT."""
    root.mkdir()
    unshare = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*unshare, "mount", "-t", "tmpfs", "tmpfs", str(root)], capture_output=True).returncode:
        pytest.skip("needs a mount namespace")
    file = root.with_suffix(".py")
    file.write_text(HEAD + textwrap.dedent(script))
    environment = {**os.environ, "ROOT": str(root), "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*unshare, "sh", "-ec", f'{mount}; exec "$0" "$1"', sys.executable, str(file)],
        env=environment, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [*done.stdout.splitlines(), done.stderr]


def test_a_full_disk(tmp_path: pathlib.Path) -> None:
    """It fills up, a save fails, space is made, and saving goes on; the first checkpoint is there all the time."""
    *told, said = run_mounted(tmp_path / "root", 'mount -t tmpfs -o size=3m tmpfs "$ROOT"', """
    checkpointer = Checkpointer(CheckpointPolicy(str(ROOT)), {"box": box})
    checkpointer.save(1)
    checkpointer.wait()
    (ROOT / "ballast").write_bytes(bytes(1_900_000))
    box["w"].fill_(2)
    checkpointer.save(2)
    told(checkpointer.wait)
    print(Catalog(ROOT).steps(), Catalog(ROOT).verify(1, deep=True).ok)
    (ROOT / "ballast").unlink()
    checkpointer.save(2)
    checkpointer.close()
    print(Catalog(ROOT).steps(), Catalog(ROOT).verify(2, deep=True).ok)
    """)  # fmt: skip
    assert told == [f"{errno.ENOSPC} True True True True", "[1] True", "[1, 2] True"]
    assert "bytes were needed" in said
    assert "Free some space" in said


def test_a_folder_that_becomes_read_only_and_one_that_is(tmp_path: pathlib.Path) -> None:
    *told, said = run_mounted(tmp_path / "root", 'mount -t tmpfs -o size=9m tmpfs "$ROOT"', """
    import subprocess
    checkpointer = Checkpointer(CheckpointPolicy(str(ROOT)), {"box": box})
    checkpointer.save(1)
    checkpointer.wait()
    subprocess.run(["mount", "-o", "remount,ro", str(ROOT)], check=True)
    checkpointer.save(2)
    told(checkpointer.wait)
    told(lambda: Checkpointer(CheckpointPolicy(str(ROOT)), {"box": box}))
    print(Catalog(ROOT).steps(), find_latest_valid(ROOT) is not None)
    checkpointer.close()
    """)  # fmt: skip
    assert told == [f"{errno.EROFS} True False False True"] * 2 + ["[1] True"]
    assert said.count("mounted read-only") >= 2


def test_a_folder_that_this_user_may_not_write_to(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "root"
    save(root, 1, box=box())
    root.chmod(0o555)
    script = (
        HEAD + 'told(lambda: Checkpointer(CheckpointPolicy(str(ROOT)), {"box": box}))\nprint(Catalog(ROOT).steps())'
    )
    without_rights = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*without_rights, sys.executable, "-c", script], capture_output=True, text=True, timeout=90,
        env={**os.environ, "ROOT": str(root), "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    root.chmod(0o755)
    assert done.stdout.splitlines() == [f"{errno.EACCES} True False False True", "[1]"], done.stderr
    assert "may not write there" in done.stderr


def test_plain_dcp_on_a_full_disk(tmp_path: pathlib.Path) -> None:
    (said,) = run_mounted(tmp_path / "root", 'mount -t tmpfs -o size=1m tmpfs "$ROOT"', """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    dcp.save({"w": torch.ones(9)}, storage_writer=VolumeWriter(ROOT / "a"))
    try:
        dcp.save({"w": torch.ones(400_000)}, storage_writer=VolumeWriter(ROOT / "b"))
    except CheckpointException as error:
        (cause, _), = error.failures.values()
        assert type(cause) is CheckpointSaveError and cause.unrecoverable and cause.needed_bytes > 1_600_000
        assert "bytes are free" in str(cause) and str(ROOT / "b") in str(cause)
        assert not (ROOT / "b" / ".metadata").exists()
    else:
        raise SystemExit("no error")
    live = {"w": torch.zeros(9)}
    dcp.load(live, storage_reader=VolumeReader(ROOT / "a"))
    assert bool((live["w"] == 1).all())
    """)  # fmt: skip
    assert "Traceback" not in said


# ---- what was committed before


def test_a_step_already_committed_stays_until_its_successor_is_whole(tmp_path: pathlib.Path, arm: Any) -> None:
    """The same step again goes to a folder of its own."""
    save(tmp_path, 1, box=box(value=1))
    before = content(tmp_path)
    fired = arm("checkpoint.metadata=errno:EIO")
    with pytest.raises(CheckpointSaveError):
        save(tmp_path, 1, box=box(value=2))
    assert len(fired()) == 1
    after = content(tmp_path)
    assert {path: after[path] for path in before} == before
    arm("")
    for again, value in ((False, 1), (True, 2)):
        if again:
            save(tmp_path, 1, box=box(value=2))
        live = box(value=0)
        with Checkpointer(CheckpointPolicy(), {"box": live}, store=PosixStore(tmp_path)) as checkpointer:
            assert checkpointer.restore() is not None
        assert live["w"][0] == value


def test_plain_dcp_refuses_a_folder_that_is_committed(tmp_path: pathlib.Path) -> None:
    dcp.save(box(), storage_writer=VolumeWriter(tmp_path / "a"))
    before = content(tmp_path)
    with pytest.raises(CheckpointException, match="already holds a committed checkpoint"):
        dcp.save(box(value=2), storage_writer=VolumeWriter(tmp_path / "a"))
    assert content(tmp_path) == before
