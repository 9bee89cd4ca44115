"""Law 1: killed at any step and begun again, a run gives the batches, draws, losses and weights that it would have.

A job is run once undisturbed. Then it is run again and killed (SIGKILL) at every step: each process restores the newest
checkpoint, completes one step, has it checkpointed, and dies in the middle of the next. What each of them did, from
other initial weights and other seeds, must be what the undisturbed run did, to the bit.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import numpy as np
import torch

from sgpu.checkpoint import Catalog
from sgpu.contract.policies import CheckpointPolicy
from sgpu.testing.laws.fresh import FreshProcesses
from sgpu.testing.laws.training import Training
from sgpu.testing.laws.worker import become_worker, make_run
from sgpu.training import TrainLoop, seed_everything

_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class ResumeCase:
    """A job whose data come from the pipeline under test.

    Attributes:
        make_loader: makes the loader; called once in each process.
        read: a batch -> the numbers of its samples, and their features, float32 of shape (samples, width).
        each_epoch: the numbers that an epoch must hold, sorted; None: not looked at (an endless stream).
        width: features a sample.
        options: further arguments of `TrainLoop`.
        make_training: makes what is trained, for so many features.
        into_step: batches of the next step that are trained before the process is killed.
    """

    make_loader: Callable[[], Any]
    read: Callable[[Any], tuple[list[int], torch.Tensor]]
    each_epoch: tuple[int, ...] | None
    width: int = 4
    options: Mapping[str, Any] = field(default_factory=lambda: {"epochs": 3})
    make_training: Callable[[int], Training] = Training
    into_step: int = 0


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What one process did.

    Attributes:
        began_at: the step that it restored.
        records: one a batch: step, epoch, samples, features, loss, learning rate, draws.
        digest: of weights, optimizer and counters at the end; None: it was killed before.
    """

    began_at: int
    records: tuple[tuple[Any, ...], ...]
    digest: str | None


def check_resume_at_every_step(case: ResumeCase, folder: pathlib.Path, processes: FreshProcesses) -> Ledger:
    """Asserts the law for a case.

    Returns:
        The undisturbed run's, for assertions of the caller's own.

    Raises:
        AssertionError: what differs, and where.
    """
    _travel_by_value(case.make_loader, case.read, case.make_training)
    whole = _run(case, folder / "whole", processes, number=0, kill=False)
    assert whole.digest is not None
    _check_epochs(case, whole)
    last = whole.records[-1][0] + 1
    for step in range(last):
        part = _run(case, folder / "killed", processes, number=step + 1, kill=step < last - 1)
        assert part.began_at == step, f"process {step} restored step {part.began_at}"
        begin = next(place for place, record in enumerate(whole.records) if record[0] == step)
        told = whole.records[begin : begin + len(part.records)]
        assert part.records == told, _difference(step, told, part.records)
        assert part.digest in (None, whole.digest), "all steps were the same, but not the weights at the end"
    assert part.digest == whole.digest
    return whole


def _travel_by_value(*functions: Callable[..., Any]) -> None:
    for function in functions:
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if module is not None and module.__name__ != "__main__" and not module.__name__.startswith("sgpu."):
            cloudpickle.register_pickle_by_value(module)


def _check_epochs(case: ResumeCase, whole: Ledger) -> None:
    """Else the law could hold for a pipeline that gives the same batch for ever."""
    epochs: dict[int, list[int]] = {}
    for _, epoch, numbers, *_ in whole.records:
        epochs.setdefault(epoch, []).extend(numbers)
    if case.each_epoch is not None:
        for epoch, numbers in epochs.items():
            assert tuple(sorted(numbers)) == case.each_epoch, f"epoch {epoch} held {sorted(numbers)}"
    assert len({record[3] for record in whole.records}) == len(whole.records), "two batches had the same features"


def _difference(step: int, told: tuple[Any, ...], found: tuple[Any, ...]) -> str:
    for one, other in zip(told, found, strict=False):
        if one != other:
            return f"resumed from step {step}: expected {one}, found {other}"
    return f"resumed from step {step}: expected {len(told)} batches, found {len(found)}"


# ---- the processes


def _run(case: ResumeCase, folder: pathlib.Path, processes: FreshProcesses, *, number: int, kill: bool) -> Ledger:
    folder.mkdir(parents=True, exist_ok=True)
    ledger, log = folder / f"ledger{number}.jsonl", folder / f"log{number}"
    code = processes.run(functools.partial(_train, case, folder, ledger, number, kill), log=log)
    assert code == (-signal.SIGKILL if kill else 0), f"process {number} ended with {code}:\n{log.read_text()[-4000:]}"
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    digest = None if kill else lines.pop()
    return Ledger(began_at=lines.pop(0), records=tuple(_frozen(line) for line in lines), digest=digest)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _train(case: ResumeCase, folder: pathlib.Path, ledger: pathlib.Path, number: int, kill: bool) -> None:
    torch.set_num_threads(1)
    make_run(folder / f"run{number}", world_size=1)
    become_worker(folder / f"run{number}", rank=0, world_size=1)
    seed_everything(1000 + max(1, number))  # the first that is killed begins as the undisturbed one does
    training = case.make_training(case.width)
    root = folder / "checkpoints"
    loop = TrainLoop(
        **training.parts(), loader=case.make_loader(),
        checkpoints=CheckpointPolicy(str(root), every_steps=1, keep_last=3), **case.options,
    )  # fmt: skip
    output = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    began_at, into_step = loop.step, 0
    _tell(output, began_at)
    for batch in loop:
        training.begin(loop)
        numbers, features = case.read(batch)
        rows = features if len(features) > 1 else torch.cat([features, 2 * features])  # batch norm needs two
        loss = training.loss(rows)
        draws = [float(torch.rand(())), float(np.random.rand())]
        sample = hashlib.sha256(features.numpy().tobytes()).hexdigest()[:16]
        _tell(output, [loop.step, loop.epoch, numbers, sample, loss.item(), training.rate(), draws])
        if kill and loop.step > began_at:
            if into_step == case.into_step:
                _wait_for_step(root, loop.step)
                os.kill(os.getpid(), signal.SIGKILL)
            into_step += 1
        training.learn(loop, loss)
    _tell(output, training.digest(loop))


def _tell(output: int, value: Any) -> None:
    os.write(output, json.dumps(value).encode() + b"\n")


def _wait_for_step(root: pathlib.Path, step: int) -> None:
    """Until the background save of the step before is committed; it is the one that the next process must find."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while step not in Catalog(str(root)).steps():
        if time.monotonic() > deadline:
            raise AssertionError(f"no checkpoint of step {step} within {_DEADLINE_SECONDS:g} s")
        time.sleep(0.005)
