"""`Checkpointer`: saves in the background, restores the newest checkpoint that is whole."""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Collection, Mapping
from concurrent.futures import wait
from types import TracebackType
from typing import Any, Literal

from sgpu import settings
from sgpu.checkpoint import arguments, leaving, versions
from sgpu.checkpoint.attempts import Attempts
from sgpu.checkpoint.background import Background, Flight, call_before_steps, finish_in_background
from sgpu.checkpoint.helper.finish import try_to_tell
from sgpu.checkpoint.helper.helper_writer import HelperWriter
from sgpu.checkpoint.helper.writers import ThreadWriter, Writer
from sgpu.checkpoint.keeping import prune
from sgpu.checkpoint.live import state as state_parts
from sgpu.checkpoint.live.stage import Staged, Stager
from sgpu.checkpoint.outcomes import Outcomes
from sgpu.checkpoint.reports import Restored, SaveReport
from sgpu.checkpoint.restoring.ranks import Ranks
from sgpu.checkpoint.restoring.restore import Restorer
from sgpu.checkpoint.stores import trouble
from sgpu.checkpoint.stores.opening import open_store
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing.job import SaveJob
from sgpu.contract.clock import Clock, SystemClock
from sgpu.contract.errors import CheckpointError
from sgpu.contract.failpoint import failpoint
from sgpu.contract.policies import CheckpointPolicy

log = logging.getLogger("sgpu.checkpoint")

# Where the process ends without close(): ranks that make no progress for so long are not waited for.
LEAVING_SECONDS = 10.0


class Checkpointer:
    """Saves `state` and restores it, on all ranks together.

    Order of calls: make it on every rank; `restore()`; then, in the same order on every rank, `save(step)` from time
    to time and `poll()` as often as wished; `close()` at the end. `save` copies this rank's share and returns; it is
    written and committed in the background, without collectives. A checkpoint exists for all ranks or for none.

    Args:
        policy: root, retention, and what happens when a background save fails.
        state: name -> module (also wrapped in DDP, or sharded by FSDP2), optimizer, anything with `state_dict` and
            `load_state_dict`, or a dictionary, list or tensor. The same on every rank: values that are not tensors
            are compared.
        per_rank: name -> anything with `state_dict` and `load_state_dict` whose state is kept for each rank: random
            generators, loader position, counters.
        root: beats `policy.root`.
        rank, world_size: None: as `sgpu.runtime` says.
        generation: of the run, for people who look into the root.
        replicated: names in `state` whose tensors are equal on all ranks at each save (an average of the weights, kept
            by hand): each rank then writes a part of them. Parameters and optimizer state always count as such.
        staging: "foreground": everything may change as soon as `save` returns. "background": `save` returns sooner, and
            parameters, optimizer state and `replicated` must stay as they are until the next optimizer step, which
            waits for the copy; if one changes before, that save fails and says so. Everything else is still copied at
            the call. "auto": as "background", until such a change is noticed: it is told in the save's report, not
            raised, and from then on it is "foreground".
        store: beats `root`; for a store of your own, which is then written from a thread of this process.
        timeout_seconds: a save that makes no progress for so long has failed.

    Raises:
        InputError: an entry of `state` could not be restored, or ranks are not as torch.distributed has them.
        CheckpointError: there is no root, or it cannot be written.
    """

    def __init__(
        self,
        policy: CheckpointPolicy,
        state: Mapping[str, Any],
        *,
        per_rank: Mapping[str, Any] | None = None,
        root: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        generation: int = 0,
        replicated: Collection[str] = (),
        staging: Literal["foreground", "background", "auto"] = "foreground",
        store: Store | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        arguments.check_staging(staging)
        prune.check_rule(policy.keep_best)
        where = root if root is not None else policy.root
        if store is None and where is None:
            raise CheckpointError("there is no place for checkpoints: give root, or CheckpointPolicy(root=...).")
        self._policy = policy
        self._parts = state_parts.take_apart(dict(state), frozenset(replicated))
        self._per_rank = dict(per_rank or {})
        arguments.check_per_rank(self._per_rank)
        self._store = store if store is not None else open_store(where or "")
        self._ranks = Ranks(rank, world_size, timeout_seconds)
        self._writer: Writer = (
            ThreadWriter(self._store, timeout_seconds)
            if store is not None
            else HelperWriter(self._store, self._ranks.rank, generation, timeout_seconds, peers=policy.peer_memory)
        )
        if policy.peer_memory and self._writer.alone is not None:
            log.warning("peer_memory: nothing is copied to another node: %s", self._writer.alone)
        self._stager = Stager(
            self._parts, self._per_rank, self._ranks.rank, self._ranks.world_size, self._writer.segment
        )
        self._background = Background()
        self._settled, self._closed, self._saves = False, False, 0
        self._salt = secrets.token_bytes(4)
        self._clock: Clock = SystemClock()
        self._generation = generation
        self._outcomes = Outcomes(self._store.url, policy, self._writer, self._clock, forgiving=staging == "auto")
        self._deferring = staging != "foreground"
        self._hooks = [call_before_steps(self.before_optimizer_step)] if self._deferring else []
        self._attempts = Attempts(self._store, self._ranks, generation)
        self._restored_from: str | None = None
        self._damaged: frozenset[str] = frozenset()
        self._flight: Flight | None = None
        leaving.opened(self)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def restore(self, *, before: int | None = None) -> Restored | None:
        """Puts the newest valid checkpoint into the live objects; all ranks take the same one.

        A damaged one is passed over by all ranks together, reported in `Restored.skipped`, and left on disk.

        Args:
            before: only those of earlier steps.

        Returns:
            None where nothing was ever committed.

        Raises:
            CheckpointMismatchError: checkpoint and live objects do not fit; names missing, unexpected and different
                keys. The live objects are untouched.
            CheckpointCorruptError: there are checkpoints, and all of them are damaged.
        """
        self.wait()
        restorer = Restorer(self._store, self._parts, self._per_rank, self._ranks)
        self._stager.forget()  # what is read for several ranks lies in its segment for a while
        restored = restorer.restore(self._writer, before=before)
        if restored is not None:
            self._restored_from = restored.path.rpartition("/")[2]
            self._damaged = frozenset(skipped.path.rpartition("/")[2] for skipped in restored.skipped)
        return restored

    def restored_per_rank(self, rank: int) -> dict[str, Any]:
        """Name -> state that some rank had when the restored checkpoint was written.

        For another world size, where `Restored.per_rank_restored` is False.
        """
        if self._restored_from is None:
            raise CheckpointError("nothing was restored: call restore() first, and see that it found a checkpoint.")
        return Restorer(self._store, self._parts, self._per_rank, self._ranks).per_rank_state(self._restored_from, rank)

    def save(self, step: int, *, metadata: dict[str, Any] | None = None) -> None:
        """Takes the state as it is now, and returns; the checkpoint appears in the background.

        Waits for an earlier save that is still under way.

        Args:
            step: optimizer steps done.
            metadata: for people, tools and `keep_best` (numbers, under their names or under "metrics"); JSON.

        Raises:
            CheckpointSaveError: an earlier save failed (on every rank; not with `on_error="warn"`), or the state
                holds something that cannot be kept.
        """
        started = self._clock.monotonic()
        arguments.check_step(step)
        noted = arguments.plain_json(metadata)
        self._require_open()
        self._settle(in_save=True)
        self._outcomes.raise_error()
        if not self._settled:
            self._writer.settle()
            self._settled = True
        folder = self._attempts.next_folder(step)
        staged = self._stage(step, folder, started)
        if staged is None:
            return
        job = SaveJob(
            folder=folder, step=step, attempt=self._attempts.number, generation=self._generation, rank=self._ranks.rank,
            world_size=self._ranks.world_size, layout=staged.share.layout, objects={}, metadata=noted,
            versions=versions.all_versions(), run_id=run.name if (run := settings.run_dir()) else None,
            policy=self._policy, keep=self._outcomes.kept(self._restored_from, step),
            damaged=tuple(self._damaged), since=started,
        )  # fmt: skip
        flight = Flight(step=step, folder=folder, started=started, size_bytes=staged.size_bytes)
        self._saves += 1
        mark = int.from_bytes(self._salt + self._saves.to_bytes(4, "little"), "little")
        self._background.start(
            flight, functools.partial(finish_in_background, self._store, self._writer, staged, job, flight, mark)
        )
        self._flight = flight
        flight.blocked_seconds = self._clock.monotonic() - started

    def before_optimizer_step(self) -> None:
        """Waits until the state is staged; to be called before parameters change. Costs nothing when it is.

        torch's optimizers call it by themselves.
        """
        flight = self._flight
        if flight is not None and not flight.staged.is_set():
            started = self._clock.monotonic()
            flight.staged.wait()
            flight.blocked_seconds += self._clock.monotonic() - started

    def poll(self) -> list[SaveReport]:
        """Saves that finished since the last call. Cheap."""
        if self._flight is not None and self._flight.work.done():
            self._settle()
        return self._outcomes.take_reports()

    def wait(self) -> None:
        """Waits until the save under way is committed.

        Raises:
            CheckpointSaveError: it, or an earlier one, failed (not with `on_error="warn"`).
        """
        self._settle()
        self._outcomes.raise_error()

    def close(self) -> None:
        """Waits, and ends what was started. Raises as `wait`."""
        if self._closed:
            return
        self._closed = True
        self._settle()
        self._release()
        self._writer.close()
        self._attempts.close()
        self._ranks.close()
        self._outcomes.raise_error()

    def _release(self) -> None:
        leaving.closed(self)
        for hook in self._hooks:
            hook.remove()
        self._background.close()
        self._stager.close()

    def leave(self) -> None:
        """What happens at the interpreter's end without `close()`: finishes what can be, and says what was lost."""
        self._writer.hurry(LEAVING_SECONDS)
        if self._writer.outlives and self._flight is not None and self._flight.handed.wait(LEAVING_SECONDS):
            return
        try:
            self.close()
        except CheckpointError as error:
            log.error("the process ends, and nobody asked how its last save went: %s", error)

    def let_go(self) -> None:
        """What happens where the process goes on after the call that made this: hands over what is staged."""
        self._writer.hurry(LEAVING_SECONDS)
        if (flight := self._flight) is not None and flight.handed.wait(LEAVING_SECONDS) and not self._writer.outlives:
            wait([flight.work], LEAVING_SECONDS)
        self._closed = True
        self._release()
        self._writer.leave()

    def _require_open(self) -> None:
        if self._closed:
            raise CheckpointError("this Checkpointer is closed; make another.", path=self._store.url)

    def _stage(self, step: int, folder: str, started: float) -> Staged | None:
        """None: that failed, and the policy says that training goes on."""
        reason, facts = "its state_dict() failed", dict[str, Any]()
        try:
            failpoint("checkpoint.stage", self._ranks.rank, step=step)
            self._attempts.claim()
            staged = self._stager.stage(deferring=self._deferring)
            reason = ""
            return staged
        except (OSError, CheckpointError) as error:
            failure = trouble.not_saved(error, self._store, folder=folder, step=step, rank=self._ranks.rank)
            why, facts = trouble.cause(failure)
            reason = f"its state could not be staged: {why}"
            self._outcomes.not_staged(failure, started)
            return None
        finally:
            if reason:
                try_to_tell(self._store, folder, self._ranks.rank, reason, facts)

    def _settle(self, *, in_save: bool = False) -> None:
        flight, self._flight = self._flight, None
        if flight is not None:
            self._outcomes.settle(flight, in_save=in_save)
            self._deferring = self._deferring and not self._outcomes.changed_early
