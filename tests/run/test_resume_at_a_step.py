"""A chosen checkpoint: the run itself goes on where it would take that one; otherwise a new run begins there."""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

import sgpu
from sgpu import CheckpointPolicy, distributed
from sgpu.cli import app
from sgpu.contract.errors import CheckpointNotFoundError, InputError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]  # three runs a test

STEPS = 18
SECONDS = 100.0  # of one run, on a slow machine


def train(fail_file: str) -> list[float]:
    """A line of losses; with dropout, so that a random draw that is not the same shows."""
    import time

    import torch

    from sgpu import TrainLoop
    from sgpu.data import DataLoader

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    data = DataLoader([torch.full((3,), float(number)) for number in range(36)], batch_size=2, shuffle=True)
    loop = TrainLoop(model=model, optimizer=optimizer, loader=data, checkpoint_every=3)
    losses = []
    for batch in loop:
        if loop.step == 10 and os.path.exists(fail_file):
            raise ValueError("asked to fail")
        while loop.step == 10 and os.path.exists(f"{fail_file}.not yet"):
            time.sleep(0.02)
        if os.path.exists(f"{fail_file}.slow"):
            time.sleep(0.1)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def files_of(root: pathlib.Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_a_new_run_begins_at_an_older_step_and_the_old_one_stays_as_it_is(tmp_path: pathlib.Path) -> None:
    root = tmp_path / "checkpoints"
    whole = distributed(gpus=1, checkpoints=CheckpointPolicy(root=str(root), keep_last=10))(train).submit(
        "no such file"
    )
    (losses,) = whole.result(SECONDS)
    assert len(losses) == STEPS
    with pytest.raises(InputError, match=r"has succeeded; .* resume\(step=\.\.\.\)"):
        whole.resume()
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint of step 5"):
        whole.resume(step=5)
    assert len(sgpu.runs()) == 1, "a run that cannot begin has left a folder"
    before = files_of(pathlib.Path(whole.path)), files_of(root)

    told: Any = CliRunner().invoke(app, ["resume", whole.id, "--step", "6", "--wait"])
    assert told.exit_code == 0, told.output
    branch = sgpu.runs()[0]
    assert f"run {branch.id} begins at step 6 of {whole.id}" in told.output
    assert branch.result(SECONDS) == [losses[6:]], "the steps after 6 are not those of the first run"
    assert [event["step"] for event in branch.events() if event["kind"] == "restored"] == [6]
    assert branch.spec.tags["sgpu.begun_at"] == f"{whole.id} step 6"
    assert set(branch.checkpoints().steps()) >= {6, 9, 12, 15, 18}
    assert (files_of(pathlib.Path(whole.path)), files_of(root)) == before


def test_a_failed_run_goes_on_itself_at_its_newest_step_and_not_at_another(
    tmp_path: pathlib.Path, until: Callable[..., Any]
) -> None:
    fail = tmp_path / "fail"
    fail.touch()
    (tmp_path / "fail.slow").touch()  # half a second ahead, where it stops, is to be before the end
    run = distributed(gpus=1, restarts=0, checkpoints=CheckpointPolicy(keep_last=10))(train).submit(str(fail))
    with pytest.raises(ValueError, match="asked to fail"):
        run.result(SECONDS)
    fail.unlink()
    branch = run.resume(step=3)
    assert branch.id != run.id
    (from_three,) = branch.result(SECONDS)
    assert len(from_three) == STEPS - 3
    assert run.state == "FAILED"

    hold = tmp_path / "fail.not yet"
    hold.touch()
    command = [sys.executable, "-c", "from sgpu.cli import main; main()", "resume", run.id, "--step", "9", "--wait"]
    waiting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    until(lambda: run.state == "RUNNING" and run.status.step >= 10, "the held step")
    waiting.send_signal(signal.SIGTERM)  # as a scheduler does that wants the machine back
    until(lambda: [event for event in run.events() if event["kind"] == "preempted"], "the agent's notice")
    hold.unlink()
    told, _ = waiting.communicate(timeout=SECONDS)
    assert (waiting.returncode, run.state) == (75, "PREEMPTED"), told

    same = run.resume()
    assert same.id == run.id
    (rest,) = same.result(SECONDS)
    assert rest == from_three[-len(rest) :]
    assert 0 < len(rest) < STEPS - 9
