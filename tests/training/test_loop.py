"""What the loop does beside resuming: saves on demand, stops early, refuses what cannot work, tells what failed."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
from dataclasses import replace
from typing import Any

import pytest

from sgpu.checkpoint import Catalog, Checkpointer, Restored
from sgpu.contract import failpoint
from sgpu.contract.errors import CheckpointSaveError
from sgpu.contract.heartbeat import Request
from sgpu.training import Preempted, settle_left_loops
from tests.training.looping import Begin, Training, events


def test_save_makes_a_checkpoint_of_the_present_step(root: pathlib.Path, supervised: Begin) -> None:
    run, _ = supervised()
    training = Training(root, checkpoint_every=100)
    for number, _ in enumerate(training, start=1):
        if number == 2:
            training.loop.save()
    assert Catalog(str(root)).steps() == [2, 4]
    assert [event["step"] for event in events(run, "checkpoint_committed")] == [2, 4]


def test_stop_ends_the_loop_after_the_step_and_the_next_loop_goes_on(root: pathlib.Path, supervised: Begin) -> None:
    supervised()
    training = Training(root, checkpoint_every=100)
    seen = []
    for batch in training:
        seen += batch[0][:, 0].tolist()
        training.loop.stop()
    assert (seen, training.loop.step, Catalog(str(root)).steps()) == ([0, 1], 1, [1])
    supervised()
    rest = Training(root, checkpoint_every=100)
    assert rest.loop.step == 1
    assert [sample for batch in rest for sample in batch[0][:, 0].tolist()] == [2, 3, 4, 5, 6, 7]


def test_what_was_restored_from_memory_alone_is_on_the_volume_in_the_end(
    root: pathlib.Path, supervised: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its save had failed: the disk was full, say, and the helper process still held the bytes."""
    supervised()
    Training(root, checkpoint_every=100).run()
    from_volume = Checkpointer.restore

    def from_memory(checkpointer: Checkpointer) -> Restored | None:
        restored = from_volume(checkpointer)
        for folder in root.glob("step-*"):
            shutil.rmtree(folder)
        return replace(restored, source="memory") if restored is not None else None

    monkeypatch.setattr(Checkpointer, "restore", from_memory)
    supervised()
    assert Training(root, checkpoint_every=100).run() == 0
    assert Catalog(str(root)).steps() == [4]


def test_a_signal_to_one_rank_alone_is_told_and_stops_nothing(root: pathlib.Path, supervised: Begin) -> None:
    run, _ = supervised()
    for number, _ in enumerate(Training(root, checkpoint_every=100)):
        if number == 0:
            os.kill(os.getpid(), signal.SIGTERM)
    assert Catalog(str(root)).steps() == [4]
    assert [event["message"].partition(":")[0] for event in events(run, "warning")] == [
        "rank 0 got a signal to stop and goes on after step 1"
    ]


def test_a_loop_takes_signals_while_it_runs_and_no_longer(root: pathlib.Path, supervised: Begin) -> None:
    supervised()
    training = Training(root, checkpoint_every=100)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a loop that nobody begins must not keep its process"
    for _ in training:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert list(training.loop) == [], "it is over"
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("how", ["break", "raise"])
def test_leaving_the_loop_inside_a_step_saves_nothing_of_it(how: str, root: pathlib.Path, supervised: Begin) -> None:
    supervised()
    training = Training(root, checkpoint_every=2)
    weights: dict[int, Any] = {}

    def body() -> None:
        for _ in training:
            weights[training.loop.step + 1] = training.model.weight.item()
            if training.loop.step == 2 and how == "raise":
                raise ArithmeticError("the user's own")
            if training.loop.step == 2:
                break

    if how == "raise":
        with pytest.raises(ArithmeticError):
            body()
    else:
        body()
    training.loop._checkpointer.close()
    assert Catalog(str(root)).steps() == [2]
    supervised()
    restored = Training(root)
    assert restored.loop.step == 2
    assert restored.model.weight.item() == weights[2] != weights[3]


def test_asked_to_stop_it_saves_the_present_step_and_the_next_loop_goes_on(
    root: pathlib.Path, supervised: Begin
) -> None:
    _, slot = supervised()
    training = Training(root, checkpoint_every=100)
    seen: list[float] = []

    def body() -> None:
        for batch in training:
            seen.extend(batch[0][:, 0].tolist())
            slot.request(Request.SAVE_AND_STOP, stop_step=2)

    with pytest.raises(Preempted, match="stopped after step 2, with a checkpoint of it"):
        body()
    weight = training.model.weight.item()
    assert (seen, Catalog(str(root)).steps()) == ([0, 1, 2, 3], [2])
    supervised()
    rest = Training(root)
    assert rest.model.weight.item() == weight
    assert [sample for batch in rest for sample in batch[0][:, 0].tolist()] == [4, 5, 6, 7]


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_a_save_that_failed_is_told_and_ends_the_run_unless_told_otherwise(
    on_error: str, root: pathlib.Path, supervised: Begin, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = tmp_path / "fired"
    monkeypatch.setenv("SGPU_FAILPOINT", "checkpoint.shard_written#2=errno:ENOSPC")
    monkeypatch.setenv("SGPU_FAILPOINT_LOG", str(fired))
    failpoint.reset()
    try:
        run, _ = supervised()
        training = Training(root, checkpoints={"every_steps": 1, "on_error": on_error, "keep_last": 9})
        if on_error == "raise":
            with pytest.raises(CheckpointSaveError, match=r"step 2 was not saved.*No space left"):
                training.run()
        else:
            assert training.run() == 4
            assert Catalog(str(root)).steps() == [1, 3, 4]
    finally:
        failpoint.reset()
    assert len(fired.read_text().splitlines()) == 1
    if on_error == "warn":
        (failed,) = events(run, "checkpoint_failed")
        assert failed["step"] == 2
        assert "No space left" in failed["message"]
    supervised()
    assert Training(root).loop.step >= 1


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_left_loop_still_saves_is_waited_for_and_told(
    fails: bool, root: pathlib.Path, supervised: Begin, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = tmp_path / "fired"
    action = "errno:ENOSPC" if fails else "sleep:0.2"
    monkeypatch.setenv("SGPU_FAILPOINT", f"checkpoint.shard_written={action}")
    monkeypatch.setenv("SGPU_FAILPOINT_LOG", str(fired))
    failpoint.reset()
    try:
        run, _ = supervised()
        training = Training(root, checkpoint_every=2)
        for _ in training:
            if training.loop.step == 2:
                break
        if fails:
            with pytest.raises(CheckpointSaveError, match=r"step 2 was not saved.*No space left"):
                settle_left_loops()
        else:
            settle_left_loops()
    finally:
        failpoint.reset()
    assert len(fired.read_text().splitlines()) == 1
    assert Catalog(str(root)).steps() == ([] if fails else [2])
    (told,) = events(run, "checkpoint_failed" if fails else "checkpoint_committed")
    assert told["step"] == 2
