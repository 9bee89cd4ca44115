"""The loop's checkpoints: what to restore from, when to save, and telling of it. The Checkpointer does the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgpu.checkpoint import Checkpointer
from sgpu.checkpoint.reports import Restored, SaveReport
from sgpu.contract.errors import PositionError
from sgpu.contract.policies import CheckpointPolicy
from sgpu.training.agreement import Agreement
from sgpu.training.cadence import Cadence
from sgpu.training.meter import Meter
from sgpu.training.position import Position
from sgpu.training.preemption import Preempted, StopRequest
from sgpu.training.progress import Progress
from sgpu.training.session import Session


def open_checkpointer(
    policy: CheckpointPolicy, parts: Mapping[str, Any], per_rank: dict[str, Any], session: Session
) -> Checkpointer:
    """A checkpointer of the run, of those parts that there are."""
    return Checkpointer(
        policy, {name: part for name, part in parts.items() if part is not None}, per_rank=per_rank,
        root=policy.root or str(session.run.checkpoints), rank=session.rank, world_size=session.world_size,
        generation=session.generation, staging="foreground" if parts.get("optimizer") is None else "auto",
    )  # fmt: skip


class Saver:
    """Made, it restores the newest valid checkpoint, if there is one.

    Order of calls: after each step `poll`, and `save` if `due`; `close` or `leave` at the end.

    Attributes:
        restored: what was restored.
    """

    def __init__(
        self, checkpointer: Checkpointer, policy: CheckpointPolicy, agreement: Agreement, *,
        session: Session, meter: Meter, progress: Progress, position: Position,
    ) -> None:  # fmt: skip
        self._checkpointer, self._session, self._meter = checkpointer, session, meter
        self._progress, self._position = progress, position
        self._saved_step: int | None = None
        self.restored = self._restore(agreement)
        if self.restored is not None:
            # What came from memory may have failed to reach the volume; it is saved again where no later step is.
            self._saved_step = self._progress.step if self.restored.source == "volume" else None
        self._cadence = Cadence(policy, step=self._progress.step, agree=agreement.from_main)

    def _restore(self, agreement: Agreement) -> Restored | None:
        """The newest checkpoint; an older one, where a run has grown and too little is left of an epoch to share."""
        found = self._checkpointer.restore()
        while found is not None:
            try:
                self._follow(found)
                if agreement.any(self._position.follow_others(agreement.most)) and self._session.rank == 0:
                    told = "the data of some ranks had ended just where the checkpoint was made: the rest of that epoch"
                    self._session.emit("warning", message=f"{told}, on the other ranks, is left out")
                return found
            except PositionError as error:
                older = self._checkpointer.restore(before=found.step) if "left" in error.facts else None
                if older is None:
                    raise
                told = f"step {older.step} is gone on from instead of step {found.step}: {error.facts['left']} samples "
                told += f"of the epoch were left there for {error.facts['world_size']} ranks"
                self._session.emit("warning", message=told)
                self._session.say(told)
                found = older
        return None

    def _follow(self, restored: Restored) -> None:
        for skipped in restored.skipped:
            self._session.emit("warning", message=f"checkpoint {skipped.path} was not used: {skipped.reason}")
        if not restored.per_rank_restored:
            former = self._checkpointer.restored_per_rank
            self._progress.load_state_dict(former(0)["progress"])
            self._position.load_from_another_world(
                lambda rank: former(rank)["position"], rank=self._session.rank, world=self._session.world_size,
                former_world=restored.world_size,
            )  # fmt: skip
        self._position.follow_loader()
        high = self._session.slot.high_step
        self._session.slot.beat(restored.step, self._progress.epoch)
        if self._session.rank == 0:
            self._session.emit(
                "restored", step=restored.step, seconds=restored.seconds, path=restored.path, source=restored.source,
                again_steps=max(0, high - restored.step),
            )  # fmt: skip
        self._session.say(f"resumed from step {restored.step} ({restored.path}, {restored.seconds:.2f} s)")

    def tell_finished(self) -> None:
        """Nothing is left to train. Where a new run finds that, its checkpoints are another's: an event."""
        step, restored, session = self._progress.step, self.restored, self._session
        session.say(f"the run had finished at step {step}; nothing is left to train")
        if session.rank == 0 and session.generation == 0 and restored is not None and restored.step == step:
            told = f"nothing was trained: {restored.path} is of a training that had finished at step {step}. To go on "
            told += "with it, raise epochs or max_steps; to train anew, name another folder of checkpoints"
            session.emit("warning", message=told)

    def due(self) -> bool:
        """Whether the policy wants a checkpoint of the present step."""
        return self._cadence.due(self._progress.step, step_seconds=self._meter.mean_step_seconds)

    def save(self) -> None:
        """Takes the state of the present step, unless that was done."""
        step = self._progress.step
        if self._saved_step == step:
            return
        self._meter.saving()
        if self._session.rank == 0:
            self._session.emit("checkpoint_started", step=step)
        self._checkpointer.save(step, metadata={"epoch": self._progress.epoch, "batch": self._progress.batch})
        self._saved_step = step
        self._cadence.saved(step)

    def last_words(self, stop: StopRequest, agreement: Agreement) -> Preempted:
        """The rank is to stop after the present step, which is saved if that can be done in time."""
        step, needed = self._progress.step, self._cadence.save_seconds
        left = stop.seconds_left()
        # All ranks are asked alike; one that has no time left speaks for all.
        if left is None or not agreement.any(needed > left):
            self.save()
            return Preempted(f"stopped after step {step}, with a checkpoint of it")
        told = f"no checkpoint of step {step}: one takes {needed:.1f} s, and {max(0.0, left):.1f} s are left"
        if self._session.rank == 0:
            self._session.emit("warning", message=f"{told}; what was staged before is finished")
        return Preempted(f"stopped after step {step}; {told}")

    def poll(self) -> None:
        """Tells of background saves that have ended."""
        for report in self._checkpointer.poll():
            self._tell(report)

    def _tell(self, report: SaveReport) -> None:
        self._cadence.measured(blocked_seconds=report.blocked_seconds, save_seconds=report.save_seconds)
        if self._session.rank != 0:
            return
        if report.error is not None:
            self._session.emit("checkpoint_failed", step=report.step, message=report.error)
            self._session.say(f"checkpoint of step {report.step} failed: {report.error}")
            return
        self._session.emit(
            "checkpoint_committed", step=report.step, blocked_seconds=report.blocked_seconds,
            save_seconds=report.save_seconds, size_bytes=report.size_bytes, path=report.path,
        )  # fmt: skip

    # ---- the end: one of these

    def close(self) -> None:
        """Waits until all is committed.

        Raises:
            CheckpointSaveError: a save failed, and its policy says that this ends the run.
        """
        self._meter.saving()
        self.settle()

    def settle(self) -> None:
        """The same, once the meter is closed."""
        try:
            self._checkpointer.wait()
        finally:
            self.poll()
            self._checkpointer.close()

    def leave(self, *, finish: bool) -> None:
        """After a failure without an agent: other ranks may be gone, and torchrun waits for this one to end."""
        self._meter.saving()
        if not finish:
            self._checkpointer.leave()
        self.poll()
