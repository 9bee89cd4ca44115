"""What a loop says it is in, seen from its loader and its body; and what its steps take, without declared work."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Iterator

from sgpu import runtime
from sgpu.contract.beat import Section
from sgpu.contract.heartbeat import Slot
from sgpu.training import TrainLoop
from tests.training.looping import Begin


class _Loader:
    """Two batches an epoch; notes where the rank is when one is asked for."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.seen: list[tuple[Section, str]] = []

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        for number in range(2):
            beat = self._slot.read()
            self.seen.append((beat.section, beat.section_name))
            yield number


def test_an_epochs_first_batch_is_told_from_the_others(root: pathlib.Path, supervised: Begin) -> None:
    _, slot = supervised()
    loader = _Loader(slot)
    loop = TrainLoop(loader=loader, epochs=2, checkpoints=str(root), checkpoint_every=100)
    inside = []
    for _ in loop:
        beat = slot.read()
        inside.append((beat.section, beat.section_name))
    assert loader.seen == [
        (Section.FIRST_STEP, ""), (Section.DATA, ""), (Section.DATA, "epoch_start"), (Section.DATA, ""),
    ]  # fmt: skip
    assert inside == [(Section.FIRST_STEP, ""), *[(Section.STEP, "")] * 3]
    end = slot.read()
    assert (end.section, end.section_name) == (Section.USER, "")


def test_a_steps_time_is_without_the_first_and_without_declared_work(root: pathlib.Path, supervised: Begin) -> None:
    _, slot = supervised()
    loop = TrainLoop(max_steps=4, extra={"nothing": _Nothing()}, checkpoints=str(root), checkpoint_every=100)
    told, at = [], []
    for _ in loop:
        beat = slot.read()
        at.append(time.perf_counter())
        told.append((beat.timed_steps, beat.step_seconds))
        if loop.step == 1:
            with runtime.section("evaluation"):
                _spend(0.2)
        _spend(0.02)
    assert [steps for steps, _ in told] == [0, 0, 1, 2]
    assert 0.02 <= told[2][1] < at[2] - at[1] - 0.1, "of the second step, without its evaluation of 0.2 s"
    last = slot.read()
    assert last.timed_steps == 3
    assert last.longest_step_seconds == max(told[2][1], told[3][1], last.step_seconds)


def _spend(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class _Nothing:
    def state_dict(self) -> dict[str, int]:
        return {"nothing": 0}

    def load_state_dict(self, state: dict[str, int]) -> None: ...
