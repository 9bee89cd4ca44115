"""A save that fails, anywhere, by any means: whole or absent, told, and the next one works."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from sgpu.checkpoint import Catalog, Checkpointer, CheckpointPolicy, find_latest_valid
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.contract import records
from sgpu.contract.errors import CheckpointSaveError
from sgpu.contract.rundir import RunDir


@pytest.mark.parametrize("how", ["raise", "warn"])
def test_a_full_disk_is_told_once_and_the_next_save_works(how: Any, tmp_path: pathlib.Path, arm: Any) -> None:
    fired = arm("checkpoint.shard_half#1=errno:ENOSPC")
    box = {"w": torch.zeros(100)}
    checkpointer = Checkpointer(CheckpointPolicy(str(tmp_path / "root"), on_error=how), {"box": box})
    checkpointer.save(1)
    if how == "raise":
        with pytest.raises(CheckpointSaveError, match=r"step 1 was not saved: rank 0: .*No space left") as caught:
            checkpointer.wait()
        assert (caught.value.step, caught.value.rank) == (1, 0)
    else:
        checkpointer.wait()
    (report,) = checkpointer.poll()
    assert "No space left" in (report.error or "")
    assert fired() == ["checkpoint.shard_half rank=0 nth=1 action=errno"]
    assert find_latest_valid(tmp_path / "root") is None
    checkpointer.save(1)
    checkpointer.close()
    assert checkpointer.poll()[0].error is None
    assert Catalog(tmp_path / "root").verify(1, deep=True).ok


def test_a_failure_is_raised_by_the_next_save_and_by_close(tmp_path: pathlib.Path, arm: Any) -> None:
    fired = arm("checkpoint.shard_half=errno:EIO")
    checkpointer = Checkpointer(CheckpointPolicy(str(tmp_path / "root")), {"box": {"w": torch.zeros(9)}})
    checkpointer.save(1)
    with pytest.raises(CheckpointSaveError, match="step 1"):
        checkpointer.save(2)
    checkpointer.save(3)
    with pytest.raises(CheckpointSaveError, match="step 3"):
        checkpointer.close()
    assert len(fired()) == 2


def test_what_cannot_be_removed_is_told_once(tmp_path: pathlib.Path, arm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    monkeypatch.setenv("SGPU_RUN_DIR", str(run.root))
    fired = arm("checkpoint.before_prune=errno:EIO")
    with Checkpointer(CheckpointPolicy(str(tmp_path / "root"), keep_last=1), {"box": {"w": torch.zeros(9)}}) as saver:
        for step in (1, 2, 3):
            saver.save(step)
            saver.wait()
    assert len(fired()) >= 2
    (warning,) = [event["message"] for event in records.read_all(run.events) if event["kind"] == "warning"]
    assert "old checkpoints could not be removed from" in warning
    assert "Input/output error" in warning
    assert Catalog(tmp_path / "root").steps() == [1, 2, 3]


@pytest.mark.parametrize(("action", "how"), [("exit:17", "exit code 17"), ("kill", "signal SIGKILL")])
def test_a_writer_process_that_dies_is_told_and_replaced(
    action: str, how: str, tmp_path: pathlib.Path, arm: Any
) -> None:
    fired = arm(f"checkpoint.shard_half={action}")
    checkpointer = Checkpointer(CheckpointPolicy(str(tmp_path / "root")), {"box": {"w": torch.ones(9)}})
    checkpointer.save(1)
    with pytest.raises(CheckpointSaveError, match=f"writer of rank 0 ended with {how}"):
        checkpointer.wait()
    assert len(fired()) == 1
    arm("")
    checkpointer.save(2)
    checkpointer.close()
    assert Catalog(tmp_path / "root").steps() == [2]


# For each of PLACES, a process of its own (forked, since importing torch takes longer than all of this) saves two
# steps, and a failpoint there kills it, or the helper that writes for it, in the second.
SAVE_TWO = """
import signal
from sgpu.checkpoint.stores.posix import PosixStore
from sgpu.contract import failpoint

def save_two(root, store, point):
    box = {"w": torch.ones(50_000)}
    os.environ["SGPU_FAILPOINT_LOG"] = f"{root}.log"
    checkpointer = Checkpointer(CheckpointPolicy(root, keep_last=1), {"box": box}, store=store)
    checkpointer.save(10)
    checkpointer.wait()
    box["w"].fill_(2)
    os.environ["SGPU_FAILPOINT"] = f"checkpoint.{point}=kill"
    failpoint.reset()
    if point == "handed":
        pathlib.Path(f"{root}.helper").write_text(str(checkpointer._writer._process.pid))
    checkpointer.save(20)
    checkpointer.close()

for place in os.environ["PLACES"].split():
    root, in_process = f"{ROOT}/{place}", "IN_PROCESS" in os.environ
    pid = os.fork()
    if pid == 0:
        try:
            save_two(root, PosixStore(pathlib.Path(root)) if in_process else None, place)
        except BaseException as error:
            pathlib.Path(f"{root}.error").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(1)
    print(place, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def check_after(root: pathlib.Path, step: int) -> None:
    live = {"w": torch.zeros(50_000)}
    with Checkpointer(CheckpointPolicy(), {"box": live}, store=PosixStore(root)) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert (restored.step, live["w"][0].item()) == (step, step // 10)
        assert restored.skipped == ()
        checkpointer.save(30)
    assert Catalog(root).latest() == 30


def test_a_kill_at_any_point_leaves_a_checkpoint_that_loads(
    tmp_path: pathlib.Path, run_ok: Callable[..., list[str]]
) -> None:
    """Trainer and writer at once."""
    places = ["stage", "staged", "shard_half", "shard_written", "done", "manifest", "metadata", "prune"]
    (out,) = run_ok(SAVE_TWO, PLACES=" ".join(places), IN_PROCESS="1", ROOT=str(tmp_path))
    assert out.split("\n")[:-1] == [f"{place} -9" for place in places]
    for place in places:
        assert (tmp_path / f"{place}.log").read_text().startswith(f"checkpoint.{place} ")
        check_after(tmp_path / place, 20 if place == "prune" else 10)


def test_a_writer_that_is_killed_leaves_a_checkpoint_that_loads(
    tmp_path: pathlib.Path, run_ok: Callable[..., list[str]]
) -> None:
    """One that is lost after its commit has lost nothing, and nothing is told."""
    places = ["shard_written", "metadata", "prune"]
    (out,) = run_ok(SAVE_TWO, PLACES=" ".join(places), ROOT=str(tmp_path))
    assert out.split("\n")[:-1] == [f"{place} 1" for place in places]
    assert not (tmp_path / "prune.error").exists()
    for place in places:
        assert place == "prune" or "ended with signal SIGKILL" in (tmp_path / f"{place}.error").read_text()
        assert (tmp_path / f"{place}.log").read_text().startswith(f"checkpoint.{place} ")
        check_after(tmp_path / place, 20 if place == "prune" else 10)


def test_a_trainer_killed_after_handing_over(tmp_path: pathlib.Path, run_ok: Callable[..., list[str]]) -> None:
    """Its own helper commits what was handed over, and ends by itself."""
    (out,) = run_ok(SAVE_TWO, PLACES="handed", ROOT=str(tmp_path))
    assert out == "handed -9\n"
    assert (tmp_path / "handed.log").read_text().startswith("checkpoint.handed ")
    helper = int((tmp_path / "handed.helper").read_text())
    if psutil.pid_exists(helper):
        psutil.wait_procs([psutil.Process(helper)], timeout=30)
    assert not psutil.pid_exists(helper)
    check_after(tmp_path / "handed", 20)


def test_an_unwatched_failure_is_not_a_plain_success(run_ranks: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """Under `with`, leaving raises; a process that never looks has at least said it."""
    script = """
    with Checkpointer(CheckpointPolicy(ROOT), {"box": {"w": torch.ones(3)}}) as checkpointer:
        checkpointer.save(1)
    """
    log = tmp_path / "fired.log"
    (ended,) = run_ranks(script, SGPU_FAILPOINT="checkpoint.shard_half=errno:ENOSPC", SGPU_FAILPOINT_LOG=str(log))
    assert log.exists()
    assert ended.code == 1
    assert "CheckpointSaveError" in ended.err
    assert "No space left" in ended.err


def test_what_a_rank_that_is_ahead_has_begun_is_not_cleared_away(tmp_path: pathlib.Path) -> None:
    """It may write for an attempt before rank 0 has claimed it, while rank 0 still prunes after the save before."""
    box = {"w": torch.ones(9)}
    ahead = tmp_path / "step-00000002.a1"
    with Checkpointer(CheckpointPolicy(keep_last=1), {"box": box}, store=PosixStore(tmp_path)) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        ahead.mkdir()
        (ahead / ".done-1.json").write_text("{}")
        checkpointer.save(2)
        checkpointer.wait()
        assert (ahead / ".done-1.json").exists()
        assert not (tmp_path / "step-00000001").exists()
    with Checkpointer(CheckpointPolicy(keep_last=1), {"box": box}, store=PosixStore(tmp_path)) as checkpointer:
        checkpointer.save(3)  # a later attempt: the other's is over
    assert not ahead.exists()
