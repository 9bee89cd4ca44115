"""The resilient harness around the user's own loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sgpu.checkpoint import Checkpointer
from sgpu.checkpoint.reports import Restored, SaveReport
from sgpu.contract.errors import InputError
from sgpu.contract.status import State
from sgpu.training.agreement import Agreement
from sgpu.training.arguments import check_counts, check_parts, choose_policy
from sgpu.training.buffers import OwnBuffers
from sgpu.training.cadence import Cadence
from sgpu.training.left import settle_later
from sgpu.training.meter import Meter
from sgpu.training.position import Position, Progress
from sgpu.training.preemption import Preempted, StopRequest
from sgpu.training.session import open_session


class TrainLoop:
    """Iterates the loader and keeps the run alive around the user's steps.

    Made after the model and the optimizer, it restores the newest valid checkpoint into them; iterated, it gives the
    exact next batch, beats the heart, checkpoints in the background, answers preemption and logs. Works under
    `@distributed`, under torchrun and in a bare notebook.

    Args:
        model: a module, plain, in DDP or FSDP2.
        optimizer: its optimizer.
        scheduler: a learning-rate scheduler.
        loader: what to iterate; None: the loop counts steps (`max_steps` is needed then).
        extra: name to anything with `state_dict` and `load_state_dict` (EMA, scaler, curriculum); one for all ranks.
        epochs: how often the loader is gone through.
        max_steps: the loop ends after so many optimizer steps, all restarts counted.
        checkpoint_every: optimizer steps between checkpoints; None: as the policy says, or automatic.
        checkpoints: a folder, a URL or a policy; None: the decorator's, or the run's own folder.
        accumulate: batches an optimizer step. The last group of an epoch may be smaller; `is_update_step` tells.

    Raises:
        InputError: an argument, by name.
        CheckpointMismatchError: the checkpoint does not fit the model or the optimizer.
        PositionError: the loader cannot be set to the saved position exactly.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        extra: Mapping[str, Any] | None = None,
        epochs: int = 1,
        max_steps: int | None = None,
        checkpoint_every: int | None = None,
        checkpoints: Any = None,
        accumulate: int = 1,
    ) -> None:
        check_counts(epochs=epochs, max_steps=max_steps, accumulate=accumulate, checkpoint_every=checkpoint_every)
        check_parts(loader=loader, max_steps=max_steps, extra=extra, checkpoints=checkpoints)
        self._loader, self._epochs, self._max_steps, self._accumulate = loader, epochs, max_steps, accumulate
        self._session = open_session()
        self._policy = choose_policy(self._session.policy, checkpoints=checkpoints, every=checkpoint_every)
        self._progress = Progress()
        buffers = OwnBuffers(model, world_size=self._session.world_size)
        self._position = Position(loader, self._progress, seed=self._session.seed, buffers=buffers)
        self._meter = Meter(self._session)
        self._meter.restoring()
        self._agreement = Agreement()
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **(extra or {})}
        self._checkpointer = Checkpointer(
            self._policy,
            {name: part for name, part in state.items() if part is not None},
            per_rank={"progress": self._progress, "position": self._position},
            root=self._policy.root or str(self._session.run.checkpoints),
            rank=self._session.rank,
            world_size=self._session.world_size,
            generation=self._session.generation,
            staging="auto" if optimizer is not None else "foreground",
        )
        self.restored = self._restore()
        self._cadence = Cadence(self._policy, step=self._progress.step, agree=self._agreement.from_main)
        self._stop = StopRequest(self._session.slot)
        self._save_asked = self._stop_asked = False
        # What came from memory may have failed to reach the volume; it is saved again where no later step is.
        kept = self.restored is not None and self.restored.source == "volume"
        self._saved_step: int | None = self._progress.step if kept else None
        self._closed = False

    # ---- what users read and call

    @property
    def step(self) -> int:
        """Optimizer steps completed, over all restarts."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """The epoch of the present batch, from 0."""
        return self._progress.epoch

    @property
    def is_update_step(self) -> bool:
        """Whether the present batch completes an accumulation group, so that the optimizer is due."""
        return self._completes_group(self._progress.batch + 1)

    def log(self, **metrics: Any) -> None:
        """Records numbers at the present step, for MLflow and the live view. Rank 0's are kept."""
        self._meter.log(metrics)

    def save(self) -> None:
        """Asks for a checkpoint at the end of the present step. To be called on every rank alike."""
        self._save_asked = True

    def stop(self) -> None:
        """Ends the loop after the present step, with a checkpoint of it. To be called on every rank alike."""
        self._stop_asked = self._save_asked = True

    def state_dict(self) -> dict[str, Any]:
        """The loop's own state: counters and data position of this rank."""
        return {"progress": self._progress.state_dict(), "position": self._position.state_dict()}

    def __iter__(self) -> Iterator[Any]:
        """Batches, from the exact next one on, to the end of the last epoch.

        Raises:
            Preempted: it was asked to stop, and has saved.
        """
        try:
            yield from self._all_batches()
        except GeneratorExit:  # the body broke out of the loop, or raised: which of both cannot be seen from here
            self._left()
            raise
        except BaseException as error:
            self._fail(error)
            raise
        else:
            self._finish()

    def __len__(self) -> int:
        """Batches of all epochs together.

        Raises:
            TypeError: the loader has no length.
        """
        return len(self._loader) * self._epochs

    # ---- the loop

    def _all_batches(self) -> Iterator[Any]:
        progress = self._progress
        if self._done():
            self._position.restore_draws()  # the code after the loop may draw too
            self._say(f"the run had finished at step {progress.step}; nothing is left to train")
        while not self._done():
            yield from self._epoch()

    def _done(self) -> bool:
        if self._stop_asked:
            return True
        if self._max_steps is not None and self._progress.step >= self._max_steps:
            return True
        return self._loader is not None and self._progress.epoch >= self._epochs

    def _epoch(self) -> Iterator[Any]:
        progress, meter = self._progress, self._meter
        if self._loader is None:
            batches: Iterator[Any] = iter(
                range(progress.step * self._accumulate, (self._max_steps or 0) * self._accumulate)
            )
            self._position.restore_draws()
        else:
            meter.fetching()
            batches = self._position.iterate()
        nothing = object()
        ended = False
        while not ended and not self._done():
            meter.fetching()
            batch = next(batches, nothing)
            if batch is nothing:
                self._end_epoch()
                return
            meter.training(progress.step + 1)
            yield batch
            progress.batch += 1
            if self._completes_group(progress.batch):
                progress.step += 1
                ended = self._ends_epoch()
                if ended:
                    self._exhaust(batches)
                    self._next_epoch()
                meter.stepped(progress.step, epoch=progress.epoch, total_steps=self._total_steps())
                self._after_step()

    def _completes_group(self, batch: int) -> bool:
        return batch % self._accumulate == 0 or batch == self._batches_an_epoch()

    def _batches_an_epoch(self) -> int | None:
        return self._position.batches(self._progress.epoch)

    def _ends_epoch(self) -> bool:
        return self._loader is not None and self._progress.batch == self._batches_an_epoch()

    def _exhaust(self, batches: Iterator[Any]) -> None:
        """After the last batch: lets the loader end its epoch, and does not believe a wrong length."""
        if next(batches, self) is not self:
            raise InputError(
                f"len(loader) is {self._batches_an_epoch()}, but it gave more batches; mend __len__ of its data set, "
                "or remove it"
            )

    def _end_epoch(self) -> None:
        """The loader ended by itself: its length was not known, or the last group was dropped."""
        if self._progress.batch:
            self._next_epoch()
            return
        raise InputError(
            f"the loader gave no batch in epoch {self._progress.epoch}: its data set is empty, or smaller than one "
            "batch with drop_last=True"
        )

    def _next_epoch(self) -> None:
        self._session.emit("epoch_ended", epoch=self._progress.epoch)
        self._progress.epoch += 1
        self._progress.batch = 0

    def _total_steps(self) -> int | None:
        if self._loader is None:
            return self._max_steps
        progress = self._progress
        present, later = self._position.batches(progress.epoch), self._position.batches(progress.epoch + 1)
        if present is None or later is None:
            return self._max_steps
        total = progress.step
        if progress.epoch < self._epochs:
            total += -(-(present - progress.batch) // self._accumulate)
            total += -(-later // self._accumulate) * (self._epochs - progress.epoch - 1)
        return total if self._max_steps is None else min(total, self._max_steps)

    def _after_step(self) -> None:
        step = self._progress.step
        for report in self._checkpointer.poll():
            self._tell(report)
        asked, self._save_asked = self._save_asked, False
        stop = self._asked_to_stop(step)
        if asked or stop or self._cadence.due(step, step_seconds=self._meter.mean_step_seconds):
            self._checkpoint()
        if stop:
            raise Preempted(f"stopped after step {step}, with a checkpoint of it")

    def _asked_to_stop(self, step: int) -> bool:
        if self._session.supervised:
            if self._stop.newly_signalled():
                self._session.emit(
                    "warning",
                    message=f"rank {self._session.rank} got a signal to stop and goes on after step {step}: the agent "
                    "alone stops a run; call run.cancel(), or send the signal to the agent",
                )
            return self._stop.due(step)
        return self._agreement.any(self._stop.signalled)

    # ---- checkpoints

    def _restore(self) -> Restored | None:
        restored: Restored | None = self._checkpointer.restore()
        if restored is None:
            return None
        for skipped in restored.skipped:
            self._session.emit("warning", message=f"checkpoint {skipped.path} was not used: {skipped.reason}")
        if not restored.per_rank_restored:
            former = self._checkpointer.restored_per_rank
            self._progress.load_state_dict(former(0)["progress"])
            self._position.load_from_another_world(lambda rank: former(rank)["position"], rank=self._session.rank)
        self._position.follow_loader()
        high = self._session.slot.high_step
        self._session.slot.beat(restored.step, self._progress.epoch)
        if self._session.rank == 0:
            self._session.emit(
                "restored", step=restored.step, seconds=restored.seconds, path=restored.path, source=restored.source,
                again_steps=max(0, high - restored.step),
            )  # fmt: skip
            self._say(f"resumed from step {restored.step} ({restored.path}, {restored.seconds:.2f} s)")
        return restored

    def _checkpoint(self) -> None:
        step = self._progress.step
        if self._saved_step == step:
            return
        self._meter.saving()
        if self._session.rank == 0:
            self._session.emit("checkpoint_started", step=step)
        self._checkpointer.save(step, metadata={"epoch": self._progress.epoch, "batch": self._progress.batch})
        self._saved_step = step
        self._cadence.saved(step)

    def _tell(self, report: SaveReport) -> None:
        """A background save has ended."""
        self._cadence.measured(blocked_seconds=report.blocked_seconds, save_seconds=report.save_seconds)
        if self._session.rank != 0:
            return
        if report.error is not None:
            self._session.emit("checkpoint_failed", step=report.step, message=report.error)
            self._say(f"checkpoint of step {report.step} failed: {report.error}")
            return
        self._session.emit(
            "checkpoint_committed", step=report.step, blocked_seconds=report.blocked_seconds,
            save_seconds=report.save_seconds, size_bytes=report.size_bytes, path=report.path,
        )  # fmt: skip

    # ---- the end

    def _finish(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._checkpoint()
        self._close_checkpointer()
        self._meter.idle()
        self._close("SUCCEEDED", None)

    def _left(self) -> None:
        """The loop was left inside a step: that step is not complete, so no checkpoint is made of it."""
        if self._closed:
            return
        self._closed = True
        if self._session.supervised:  # a rank that fails must not wait for others to commit
            self._meter.idle()
            self._close(None, None)
            settle_later(self._end_checkpointer)
        else:
            self._leave_checkpointer()
            self._session.settle_at_exit(step=self._progress.step, epoch=self._progress.epoch)
            self._close(None, None)

    def _fail(self, error: BaseException) -> None:
        """The loader or a save failed, or the run is to stop: then its last checkpoint is committed first."""
        if self._closed:
            return
        self._closed = True
        preempted = isinstance(error, Preempted)
        try:
            if preempted:
                self._close_checkpointer()
            elif not self._session.supervised:
                self._leave_checkpointer()
        finally:
            self._close("PREEMPTED" if preempted else "FAILED", error)

    def _leave_checkpointer(self) -> None:
        """After a failure without an agent: other ranks may be gone, and torchrun waits for this one to end."""
        self._meter.saving()
        if not self._stop.signalled:
            self._checkpointer.leave()
        for report in self._checkpointer.poll():
            self._tell(report)

    def _close_checkpointer(self) -> None:
        self._meter.saving()
        self._end_checkpointer()

    def _end_checkpointer(self) -> None:
        try:
            self._checkpointer.wait()
        finally:
            for report in self._checkpointer.poll():
                self._tell(report)
            self._checkpointer.close()

    def _close(self, state: State | None, error: BaseException | None) -> None:
        """`state` None: it shows only when the process ends."""
        self._meter.close()
        self._stop.close()
        if state is not None:
            self._session.write_status(state, step=self._progress.step, epoch=self._progress.epoch, error=error)
        if not self._session.supervised:
            self._session.slot.finish()
        if state is not None:
            self._session.close(failed=state == "FAILED")

    def _say(self, text: str) -> None:
        if self._session.rank == 0:
            print(f"sgpu: {text}", flush=True)
