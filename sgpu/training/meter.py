"""What a step cost, and where this rank's time goes: the spool, the heartbeat and the ledger in one place."""

from __future__ import annotations

import time
from typing import Any

from sgpu import runtime
from sgpu.contract.beat import EPOCH_START
from sgpu.contract.failpoint import failpoint
from sgpu.contract.heartbeat import Category, Section
from sgpu.metrics.recorder import Recorder
from sgpu.training.bottleneck import BottleneckWatch
from sgpu.training.own_time import OwnTime
from sgpu.training.session import Session

_MEMORY = 0.9  # how much of the running mean of a step's time stays


class Meter:
    """Follows the loop: `fetching`, `training`, `stepped` in turn, `saving` and `saved` around a checkpoint."""

    def __init__(self, session: Session, loader: Any = None) -> None:
        self._session, self._loader, self.own = session, loader, OwnTime()
        self._bottleneck, self._step = BottleneckWatch(loader, session), 0
        self._slot = session.slot
        self._recorder = Recorder(session.run, rank=session.rank, generation=session.generation)
        self._values: dict[str, Any] = {}
        self._at = time.perf_counter()
        self._fetch_seconds = 0.0
        self._first, self._begins_epoch = True, False
        self._began: tuple[float, float] | None = None
        self.mean_step_seconds = 0.0

    def follow(self, model: Any, optimizer: Any) -> None:
        """From here on, this rank's own part of each step is measured, where the model allows it."""
        self.own = OwnTime(model, optimizer)

    def begin_epoch(self) -> None:
        """The loader begins anew: it may list, shuffle and start its workers."""
        self._begins_epoch = True
        self.fetching()

    def end_epoch(self, epoch: int) -> None:
        """The loader has no more batches; where it left samples out, it says so, on all ranks alike."""
        self._session.emit("epoch_ended", epoch=epoch)
        told = getattr(self._loader, "left_out", "")
        if self._session.rank == 0 and told and isinstance(told, str):
            self._session.emit("warning", message=told)

    def fetching(self) -> None:
        """The loop waits for a batch."""
        self.own.pause()
        self._at = time.perf_counter()
        if self._began is None:
            self._began = self._at, runtime.declared_seconds()
        section = Section.FIRST_STEP if self._first else Section.DATA
        self._slot.enter(section, name=EPOCH_START if self._begins_epoch and not self._first else "")
        self._slot.account(Category.DATA)

    def training(self, step: int) -> None:
        """A batch is there; the user's code trains on it to complete `step`."""
        now = time.perf_counter()
        self._fetch_seconds += now - self._at
        self._at = now
        self._begins_epoch = False
        self._slot.enter(Section.FIRST_STEP if self._first else Section.STEP)
        self._slot.account(Category.RECOMPUTING if step <= self._slot.high_step else Category.PRODUCTIVE)
        self.own.begin()
        failpoint("training.step", self._session.rank, step=step)

    def log(self, values: dict[str, Any]) -> None:
        """Adds to the values of the step in progress; a later value of a name replaces an earlier."""
        for name, value in values.items():
            detach = getattr(value, "detach", None)  # a tensor must not keep its graph alive
            self._values[name] = value if detach is None else detach()

    def stepped(self, step: int, *, epoch: int, total_steps: int | None) -> None:
        """A step is complete."""
        seconds = time.perf_counter() - self._at
        self.mean_step_seconds = seconds if self._first else _MEMORY * self.mean_step_seconds + (1 - _MEMORY) * seconds
        again, first = step <= self._slot.high_step, self._first
        self._slot.beat(
            step, epoch, -1 if total_steps is None else total_steps, step_seconds=self._whole_step(),
            work_seconds=self.own.take(),
        )  # fmt: skip
        values = {"fetch_seconds": self._fetch_seconds, "step_seconds": seconds}
        if self._session.rank == 0:
            values.update(self._values)
        self._recorder.log(step, values)
        self._step = step
        self._bottleneck.look(step)
        self._values.clear()
        self._fetch_seconds = 0.0
        if self._first:
            self._first = False
        if first and self._session.rank == 0:
            self._session.emit("first_step", step=step, again=again, seconds=self._session.seconds_since_start())

    def _whole_step(self) -> float:
        """Seconds since its first batch was asked for, without sections that the user declared; 0: it says nothing."""
        began, self._began = self._began, None
        if began is None or self._first:
            return 0.0
        return max(0.0, time.perf_counter() - began[0] - (runtime.declared_seconds() - began[1]))

    def record(self, step: int, **values: float) -> None:
        self._recorder.log(step, values)

    def saving(self) -> None:
        """A checkpoint is being taken; what was measured up to it must not be lost with this process."""
        self._recorder.flush()
        self._slot.enter(Section.CHECKPOINT)
        self._slot.account(Category.CHECKPOINT)

    def idle(self) -> None:
        self._slot.enter(Section.USER)
        self._slot.account(Category.IDLE)

    def restoring(self) -> None:
        self._slot.enter(Section.INIT)
        self._slot.account(Category.RESTORING)

    def close(self) -> None:
        self._bottleneck.look(self._step, at_once=True)
        self.own.close()
        self._recorder.close()
