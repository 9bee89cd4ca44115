"""Brings a checkpoint into the live objects: all ranks the same one, compared and checked first."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from sgpu.checkpoint.format import names
from sgpu.checkpoint.helper.writers import Writer
from sgpu.checkpoint.keeping import choose
from sgpu.checkpoint.live.parts import Part
from sgpu.checkpoint.reports import Restored, Skipped
from sgpu.checkpoint.restoring import memory
from sgpu.checkpoint.restoring.attempt import Attempt, read_per_rank
from sgpu.checkpoint.restoring.ranks import Ranks
from sgpu.checkpoint.restoring.reading import ItemReader
from sgpu.checkpoint.restoring.sharing import Offer, SharedReading
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing.segment import INCOMPLETE
from sgpu.contract.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from sgpu.contract.failpoint import failpoint

log = logging.getLogger("sgpu.checkpoint")

# One bad read must not cost all steps since the checkpoint before.
LOOKS = 2


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """One rank's look at a checkpoint: first at its records (`offer`), then at its bytes (`reaches`).

    Attributes:
        away: nothing at all can be read from its store now.
    """

    reason: str | None = None
    away: bool = False
    mismatch: dict[str, list[str]] | None = None
    offer: Offer | None = None
    reaches: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A checkpoint to try: on the volume, or (with `found`) as it lies in memory."""

    folder: str
    found: memory.Found | None = None


def _order(folder: str) -> names.StepFolder:
    found = names.parse_step(folder)
    assert found is not None  # a candidate's name was parsed, or made, before
    return found


class Restorer:
    def __init__(self, store: Store, parts: list[Part], per_rank: Mapping[str, Any], ranks: Ranks) -> None:
        self._store = store
        self._parts = parts
        self._per_rank = per_rank
        self._ranks = ranks

    def restore(self, writer: Writer, *, before: int | None = None) -> Restored | None:
        started = time.monotonic()
        skipped: list[Skipped] = []
        with ExitStack() as stack:
            candidates = self._newest_first(writer, stack)
            wanted = [each for each in candidates if before is None or _order(each.folder).step < before]
            return self._restore_first(wanted, writer, started, skipped)

    def _newest_first(self, writer: Writer, stack: ExitStack) -> list[_Candidate]:
        """What is committed, and before it what memory holds, if that is not older."""
        held = memory.survey(writer, self._ranks, stack)
        if held is None:
            return self._settled(writer)
        candidates = self._candidates()
        if candidates and _order(candidates[0].folder) > _order(held.plan.folder):
            return candidates
        found = memory.bring(self._store, held, writer, self._ranks, stack)
        if found is None:
            return self._settled(writer)
        return [_Candidate(folder=found.opened.folder, found=found), *candidates]

    def _settled(self, writer: Writer) -> list[_Candidate]:
        """What is committed, once nothing is left open that helpers may still commit."""
        writer.settle()
        self._ranks.gather(None)  # all have settled, before anyone lists
        return self._candidates()

    def _restore_first(
        self, candidates: list[_Candidate], writer: Writer, started: float, skipped: list[Skipped]
    ) -> Restored | None:
        for candidate in candidates:
            for _ in range(LOOKS):
                failpoint("checkpoint.restore", self._ranks.rank)
                with ExitStack() as stack:
                    attempt, reason = self._try(candidate, writer, stack)
                    if reason is None:
                        assert attempt is not None  # this rank's verdicts were as good as all others'
                        self._apply(attempt, candidate.folder)
                        return self._report(attempt, candidate, started, skipped)
            assert reason is not None  # or it would have been taken
            in_memory = candidate.found
            path = f"{self._store.url}/{candidate.folder}" if in_memory is None else in_memory.opened.path
            log.warning("checkpoint %s was passed over: %s", path, reason)
            skipped.append(Skipped(path=path, reason=reason))
        if skipped:
            raise CheckpointCorruptError(
                f"no checkpoint under {self._store.url} can be used: "
                + "; ".join(f"{entry.path}: {entry.reason}" for entry in skipped)
                + ". Move these folders away to start afresh.",
                path=self._store.url,
                skipped=[entry.path for entry in skipped],
            )
        return None

    def _candidates(self) -> list[_Candidate]:
        """What is committed, newest first, as rank 0 sees it."""
        told: list[str] | str = ""
        if self._ranks.rank == 0:
            try:
                told = [folder.name for folder in choose.committed(self._store)]
            except OSError as error:
                told = f"{type(error).__name__}: {error}"
        told = self._ranks.from_first(told)
        if isinstance(told, str):
            raise self._unreadable(told)
        return [_Candidate(folder=folder) for folder in told]

    def _try(self, candidate: _Candidate, writer: Writer, stack: ExitStack) -> tuple[Attempt | None, str | None]:
        """Compares, then reads and checks, in step with the other ranks; with the reason, if any rank has one, why it
        cannot be used.
        """
        attempt: Attempt | None = None
        shared: SharedReading | None = None
        in_memory = candidate.found

        def compare() -> _Verdict:
            nonlocal attempt, shared
            near = (self._ranks.rank, self._ranks.world_size)
            opened = in_memory.opened if in_memory else choose.open_checkpoint(self._store, candidate.folder, near=near)
            reader = stack.enter_context(
                ItemReader(self._store, opened, in_memory.regions if in_memory else (), threads=self._ranks.threads)
            )
            attempt = Attempt.compare(reader, self._parts, self._per_rank, self._ranks)
            if in_memory or self._ranks.world_size == 1:
                return _Verdict()
            shared = SharedReading(self._ranks, writer.segment, reader, attempt.common)
            return _Verdict(offer=shared.offer())

        looked, reason = self._agree(candidate.folder, self._verdict(compare))
        if reason is not None or attempt is None:
            return None, reason
        found: Attempt = attempt
        if shared is not None and not shared.agree([verdict.offer for verdict in looked], stack):
            shared = None

        def read() -> _Verdict:
            if shared is None:
                found.check(of_memory=in_memory is not None)
                return _Verdict()
            found.check_own()
            writer.settle()  # a former trainer's image may still be written from there
            writer.segment.mark = INCOMPLETE
            shared.read_own()
            return _Verdict(reaches=shared.reaches)

        looked, reason = self._agree(candidate.folder, self._verdict(read))
        if reason is None and shared is not None:
            found.reader.sources.add(shared.exchange([verdict.reaches for verdict in looked], stack))
        found.reader.memory_is_checked()
        return found, reason

    def _verdict(self, look: Callable[[], _Verdict]) -> _Verdict:
        """What `look` finds, or why it could not."""
        try:
            return look()
        except CheckpointMismatchError as error:
            facts = {kind: list(error.facts.get(kind, [])) for kind in ("missing", "unexpected", "different")}
            return _Verdict(reason=str(error), mismatch=facts)
        except CheckpointError as error:
            return _Verdict(reason=str(error))
        except OSError as error:
            return _Verdict(reason=f"{type(error).__name__}: {error}", away=self._is_away())

    def _is_away(self) -> bool:
        try:
            self._store.names("")
        except OSError:
            return True
        return False

    def _unreadable(self, reason: str) -> CheckpointError:
        return CheckpointError(
            f"{self._store.url} cannot be read now: {reason}. No checkpoint was passed over for that: restore again "
            "when it can be read.",
            path=self._store.url,
        )

    def _agree(self, folder: str, mine: _Verdict) -> tuple[list[_Verdict], str | None]:
        """All ranks' verdicts, and why no rank may use it; None where all may.

        Raises:
            CheckpointMismatchError: on all ranks, where it does not fit the live objects of any.
            CheckpointError: on all ranks, where one can read nothing at all: that says nothing about a checkpoint.
        """
        verdicts = self._ranks.gather(mine)
        for rank, verdict in enumerate(verdicts):
            if verdict.mismatch is not None:
                raise CheckpointMismatchError(
                    f"rank {rank}: {verdict.reason}", path=f"{self._store.url}/{folder}", rank=rank, **verdict.mismatch
                )
            if verdict.away:
                raise self._unreadable(f"rank {rank}: {verdict.reason}")
        reasons = [f"rank {at}: {verdict.reason}" for at, verdict in enumerate(verdicts) if verdict.reason is not None]
        return verdicts, reasons[0] if reasons else None

    def _apply(self, attempt: Attempt, folder: str) -> None:
        done = False
        try:
            attempt.apply(self._per_rank)
            done = True
        finally:
            all_done = self._ranks.gather(done)
        if not all(all_done):
            raise CheckpointError(
                f"rank {all_done.index(False)} failed while it put {self._store.url}/{folder} into its objects; "
                "its own error says why.",
                path=f"{self._store.url}/{folder}",
            )

    def _report(self, attempt: Attempt, candidate: _Candidate, started: float, skipped: list[Skipped]) -> Restored:
        manifest = attempt.reader.opened.manifest
        return Restored(
            step=_order(candidate.folder).step,
            path=f"{self._store.url}/{candidate.folder}",
            source="volume" if candidate.found is None else candidate.found.source,
            seconds=time.monotonic() - started,
            world_size=manifest.world_size if manifest else 0,
            per_rank_restored=attempt.per_rank is not None,
            metadata=manifest.metadata if manifest else {},
            skipped=tuple(skipped),
        )

    def per_rank_state(self, folder: str, rank: int) -> dict[str, Any]:
        with ItemReader(self._store, choose.open_checkpoint(self._store, folder, shards=False)) as reader:
            manifest = reader.opened.manifest
            if manifest is None or names.rank_file(rank) not in manifest.files:
                world = manifest.world_size if manifest else 0
                raise CheckpointNotFoundError(
                    f"{reader.opened.path} holds no state of rank {rank}; it was written by {world} ranks.",
                    path=reader.opened.path,
                    rank=rank,
                )
            return read_per_rank(reader, rank)
