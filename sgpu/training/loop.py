"""The resilient harness around the user's own loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sgpu.checkpoint.reports import Restored
from sgpu.contract.status import State
from sgpu.training.agreement import Agreement
from sgpu.training.arguments import check_counts, check_parts, choose_policy
from sgpu.training.buckets import settle as settle_buckets
from sgpu.training.buffers import OwnBuffers
from sgpu.training.course import Course
from sgpu.training.divergence import Divergence, DivergencePolicy, choose_divergence
from sgpu.training.left import settle_later
from sgpu.training.meter import Meter
from sgpu.training.position import Position
from sgpu.training.preemption import Preempted, StopRequest
from sgpu.training.progress import Progress
from sgpu.training.saver import Saver, open_checkpointer
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
        divergence: what `check` does about a bad loss: "stop", "skip", "roll_back" or a policy.
        accumulate: batches an optimizer step; None: those of one global batch, where the loader fixes it, or 1. The
            last group of an epoch may be smaller; `is_update_step` tells.

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
        accumulate: int | None = None,
        divergence: DivergencePolicy | str = "stop",
    ) -> None:
        judged = choose_divergence(divergence)
        check_counts(epochs=epochs, max_steps=max_steps, accumulate=accumulate, checkpoint_every=checkpoint_every)
        check_parts(
            model=model, optimizer=optimizer, loader=loader, max_steps=max_steps, extra=extra, checkpoints=checkpoints
        )
        self._loader, self._epochs = loader, epochs
        self._session = open_session()
        policy = choose_policy(self._session.policy, checkpoints=checkpoints, every=checkpoint_every)
        self._progress = Progress()
        buffers = OwnBuffers(model, world_size=self._session.world_size)
        self._position = Position(loader, self._progress, seed=self._session.seed, buffers=buffers)
        self._course = Course(
            loader, self._position, self._progress, epochs=epochs, max_steps=max_steps, accumulate=accumulate
        )
        self._meter = Meter(self._session, loader)
        self._meter.restoring()
        self._meter.follow(model, optimizer)
        settle_buckets(model, *(extra or {}).values())
        self._agreement = Agreement()
        self._divergence = Divergence(judged, self._agreement, self._progress, self._session)
        self._checkpointer = open_checkpointer(
            policy,
            {"model": model, "optimizer": optimizer, "scheduler": scheduler, **(extra or {})},
            {"progress": self._progress, "position": self._position},
            self._session,
        )
        self._saver = Saver(
            self._checkpointer, policy, self._agreement, session=self._session, meter=self._meter,
            progress=self._progress, position=self._position,
        )  # fmt: skip
        self._stop = StopRequest(self._session.slot)
        self._save_asked = self._stop_asked = self._closed = False

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
        return self._course.completes_step

    @property
    def restored(self) -> Restored | None:
        """What was restored when the loop was made."""
        return self._saver.restored

    @property
    def finished(self) -> bool:
        """Whether all steps are done, in this process or before it was started: then the loop gives nothing more."""
        return self._course.done

    @property
    def metrics(self) -> dict[str, float]:
        """The last value that was logged under each name on this rank, also before a restart."""
        return self._progress.metrics()

    def log(self, **metrics: Any) -> None:
        """Records numbers at the present step, for MLflow and the live view. Rank 0's are kept."""
        self._progress.note(metrics)
        self._meter.log(metrics)

    def check(self, loss: Any) -> bool:
        """Whether to train on the batch in hand, asked with its loss before `backward`, on every rank alike.

        False: some rank's loss is NaN, infinite or has exploded, and all pass their batches over.

        Raises:
            DivergenceError: it is to end the run, or to take it back to the newest checkpoint.
        """
        with self._meter.own.waiting():
            return self._divergence.check(loss)

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
        self._stop.listen()
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
        """Batches of all epochs together. Raises TypeError where the loader has no length."""
        return len(self._loader) * self._epochs

    # ---- the loop

    def _all_batches(self) -> Iterator[Any]:
        if self._done():
            self._position.restore_draws()  # the code after the loop may draw too
            self._saver.tell_finished()
        while not self._done():
            yield from self._epoch()

    def _done(self) -> bool:
        return self._stop_asked or self._course.done

    def _epoch(self) -> Iterator[Any]:
        course, meter = self._course, self._meter
        if self._loader is None:
            batches: Iterator[Any] = iter(course.left_without_loader())
            self._position.restore_draws()
        else:
            meter.begin_epoch()
            batches = course.looking_ahead(self._position.iterate())
        nothing = object()
        ended = False
        while not ended and not self._done():
            meter.fetching()
            batch = next(batches, nothing)
            if batch is nothing:
                self._end_epoch()
                return
            meter.training(self._progress.step + 1)
            yield batch
            if not course.completes_step:
                course.took()
                continue
            ended = course.completes_epoch
            course.stepped()
            if ended:
                course.exhaust(batches)
                self._next_epoch()
            meter.stepped(self._progress.step, epoch=self._progress.epoch, total_steps=course.total_steps())
            self._after_step()

    def _end_epoch(self) -> None:
        """The loader ended by itself: its length was not known, or the last group was dropped."""
        if self._progress.batch:
            self._next_epoch()
            return
        raise self._course.no_batch()

    def _next_epoch(self) -> None:
        self._meter.end_epoch(self._progress.epoch)
        self._course.next_epoch()

    def _after_step(self) -> None:
        step = self._progress.step
        self._saver.poll()
        asked, self._save_asked = self._save_asked, False
        if self._asked_to_stop(step):
            raise self._saver.last_words(self._stop, self._agreement)
        if asked or self._saver.due():
            self._saver.save()

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

    # ---- the end

    def _finish(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._saver.save()
        self._saver.close()
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
            if not self._session.slot.revoked:  # else it was found only when its call had been given up
                settle_later(self._saver.settle)
        else:
            self._saver.leave(finish=self._stop.signalled)
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
                self._saver.close()
            elif not self._session.supervised:
                self._saver.leave(finish=self._stop.signalled)
        finally:
            self._close("PREEMPTED" if preempted else "FAILED", error)

    def _close(self, state: State | None, error: BaseException | None) -> None:
        """`state` None: it shows only when the process ends."""
        self._meter.close()
        self._stop.close()
        if state is not None:
            self._session.write_status(state, step=self._progress.step, epoch=self._progress.epoch, error=error)
        self._session.finish(over=state in ("SUCCEEDED", "PREEMPTED"))
        if state is not None:
            self._session.close(failed=state == "FAILED")
