"""Brings a checkpoint into the live objects: all ranks the same one, compared and checked first."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from sgpu.checkpoint import choose, filling, memory, names, values
from sgpu.checkpoint.choose import Opened
from sgpu.checkpoint.parts import SKELETON, Loading, Part, Problems, Saved
from sgpu.checkpoint.ranks import Ranks
from sgpu.checkpoint.reading import InMemory, ItemReader, Key
from sgpu.checkpoint.reports import Restored, Skipped
from sgpu.checkpoint.stage import RANK_FORMAT, object_name
from sgpu.checkpoint.storage import Store
from sgpu.checkpoint.writers import Writer
from sgpu.contract.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)

log = logging.getLogger("sgpu.checkpoint")


@dataclass(frozen=True, kw_only=True)
class _Verdict:
    """One rank's look at a checkpoint."""

    ok: bool
    reason: str = ""
    mismatch: dict[str, list[str]] | None = None


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """Everything compared and checked; `apply` is all that is left."""

    reader: ItemReader
    loadings: list[Loading]
    per_rank: dict[str, Any] | None

    def apply(self, targets: Mapping[str, Any]) -> None:
        with torch.no_grad():
            for loading in self.loadings:
                for name in loading.live:
                    filling.fill(self.reader, name, loading.targets[name])
        for loading in self.loadings:
            loading.finish()
        for name, state in (self.per_rank or {}).items():
            targets[name].load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A checkpoint to try: on the volume, or (with `opened`) as it lies in memory."""

    folder: str
    opened: Opened | None = None
    in_memory: Mapping[str, InMemory] | None = None


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

    def restore(self, writer: Writer) -> Restored | None:
        started = time.monotonic()
        skipped: list[Skipped] = []
        with ExitStack() as stack:
            image = self._newest_in_memory(writer, stack)
            candidates: list[_Candidate] = [_Candidate(folder=folder) for folder in self._candidates()]
            if image is not None and (not candidates or _order(image.folder) >= _order(candidates[0].folder)):
                candidates.insert(0, image)
            return self._restore_first(candidates, started, skipped)

    def _newest_in_memory(self, writer: Writer, stack: ExitStack) -> _Candidate | None:
        """What all ranks' helpers hold of one step, complete; where they do not, nothing that may still be committed
        by them is left open.
        """
        found = memory.common_image(self._store, writer, self._ranks, stack)
        if found is None:
            writer.settle()
            self._ranks.gather(None)  # all have settled, before anyone lists
            return None
        opened, files = found
        return _Candidate(folder=opened.folder, opened=opened, in_memory=files)

    def _restore_first(self, candidates: list[_Candidate], started: float, skipped: list[Skipped]) -> Restored | None:
        for candidate in candidates:
            folder = candidate.folder
            with ExitStack() as stack:
                ready, verdict = self._look(candidate, stack)
                reason = self._agree(folder, verdict)
                if reason is None:
                    assert ready is not None  # this rank's verdict was as good as all others'
                    self._apply(ready, folder)
                    return self._report(ready, candidate, started, skipped)
            path = f"{self._store.url}/{folder}" if candidate.opened is None else candidate.opened.path
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

    def _candidates(self) -> list[str]:
        """Committed folders, newest first, as rank 0 sees them."""
        told: list[str] | str = ""
        if self._ranks.rank == 0:
            try:
                told = [folder.name for folder in choose.committed(self._store)]
            except OSError as error:
                told = f"{type(error).__name__}: {error}"
        told = self._ranks.from_first(told)
        if isinstance(told, str):
            raise CheckpointError(f"{self._store.url} cannot be read: {told}", path=self._store.url)
        return told

    def _look(self, candidate: _Candidate, stack: ExitStack) -> tuple[_Ready | None, _Verdict]:
        try:
            opened = candidate.opened or choose.open_checkpoint(self._store, candidate.folder)
            reader = stack.enter_context(ItemReader(self._store, opened, candidate.in_memory))
            return self._prepare(reader), _Verdict(ok=True)
        except CheckpointMismatchError as error:
            facts = {kind: list(error.facts.get(kind, [])) for kind in ("missing", "unexpected", "different")}
            return None, _Verdict(ok=False, reason=str(error), mismatch=facts)
        except (CheckpointError, OSError) as error:
            return None, _Verdict(ok=False, reason=str(error))

    def _agree(self, folder: str, mine: _Verdict) -> str | None:
        """Why no rank may use it; None where all may.

        Raises:
            CheckpointMismatchError: on all ranks, where it does not fit the live objects of any.
        """
        verdicts = self._ranks.gather(mine)
        for rank, verdict in enumerate(verdicts):
            if verdict.mismatch is not None:
                raise CheckpointMismatchError(
                    f"rank {rank}: {verdict.reason}", path=f"{self._store.url}/{folder}", rank=rank, **verdict.mismatch
                )
        for rank, verdict in enumerate(verdicts):
            if not verdict.ok:
                return f"rank {rank}: {verdict.reason}"
        return None

    def _prepare(self, reader: ItemReader) -> _Ready:
        """Compares everything with the live objects, and every byte that is wanted with its checksum."""
        index = reader.opened.index
        saved_parts = {name.removesuffix(f".{SKELETON}") for name in index.objects if name.endswith(f".{SKELETON}")}
        problems = Problems()
        problems.names(saved_parts, {part.name for part in self._parts})
        self._require_fit(reader.opened, problems)
        skeleton_keys: list[Key] = [(object_name(part.name), None) for part in self._parts]
        reader.verify(skeleton_keys)
        loadings = [part.prepare(self._saved(reader, part.name, saved_parts), problems) for part in self._parts]
        per_rank = self._own_state(reader, problems)
        self._require_fit(reader.opened, problems)
        wanted: set[Key] = set()
        with torch.no_grad():
            for loading in loadings:
                for name, tensor in loading.targets.items():
                    if name in loading.live:
                        wanted |= {(name, chunk.offsets) for chunk, *_ in filling.overlaps(reader, name, tensor)}
                    else:  # nobody's yet: checked while it is read, once
                        filling.fill(reader, name, tensor)
        reader.verify(wanted)
        return _Ready(reader=reader, loadings=loadings, per_rank=per_rank)

    def _saved(self, reader: ItemReader, part: str, all_parts: set[str]) -> Saved:
        key: Key = (object_name(part), None)
        where, file = reader.opened.path, reader.place(key).file
        skeleton = values.from_bytes(reader.read(key), where, file, key[0])
        longer = [name for name in all_parts if name.startswith(f"{part}.")]  # "a" does not own the tensors of "a.b"
        tensors = {
            name: info
            for name, info in reader.opened.index.tensors.items()
            if _belongs(name, part) and not any(_belongs(name, other) for other in longer)
        }
        return Saved(tensors=tensors, skeleton=skeleton)

    def _own_state(self, reader: ItemReader, problems: Problems) -> dict[str, Any] | None:
        """This rank's own state, decoded; None where another number of ranks wrote the checkpoint."""
        manifest = reader.opened.manifest
        if manifest is None or manifest.world_size != self._ranks.world_size:
            return None
        state = read_per_rank(reader, self._ranks.rank) if names.rank_file(self._ranks.rank) in manifest.files else {}
        problems.names({f"per_rank {name}" for name in state}, {f"per_rank {name}" for name in self._per_rank})
        return state

    def _require_fit(self, opened: Opened, problems: Problems) -> None:
        if not problems:
            return
        told = [
            f"{title}: {_shortened(found)}"
            for title, found in (
                ("not in the checkpoint", problems.missing),
                ("only in the checkpoint", problems.unexpected),
                ("different", problems.different),
            )
            if found
        ]
        raise CheckpointMismatchError(
            f"{opened.path} does not fit the live objects. {'. '.join(told)}. Nothing was changed. Make the objects as "
            "they were when it was saved, or use another root to start afresh.",
            path=opened.path,
            missing=problems.missing,
            unexpected=problems.unexpected,
            different=problems.different,
        )

    def _apply(self, ready: _Ready, folder: str) -> None:
        done = False
        try:
            ready.apply(self._per_rank)
            done = True
        finally:
            all_done = self._ranks.gather(done)
        if not all(all_done):
            raise CheckpointError(
                f"rank {all_done.index(False)} failed while it put {self._store.url}/{folder} into its objects; "
                "its own error says why.",
                path=f"{self._store.url}/{folder}",
            )

    def _report(self, ready: _Ready, candidate: _Candidate, started: float, skipped: list[Skipped]) -> Restored:
        manifest = ready.reader.opened.manifest
        return Restored(
            step=_order(candidate.folder).step,
            path=f"{self._store.url}/{candidate.folder}",
            source="volume" if candidate.opened is None else "memory",
            seconds=time.monotonic() - started,
            world_size=manifest.world_size if manifest else 0,
            per_rank_restored=ready.per_rank is not None,
            metadata=manifest.metadata if manifest else {},
            skipped=tuple(skipped),
        )

    def per_rank_state(self, folder: str, rank: int) -> dict[str, Any]:
        with ItemReader(self._store, choose.open_checkpoint(self._store, folder)) as reader:
            manifest = reader.opened.manifest
            if manifest is None or names.rank_file(rank) not in manifest.files:
                world = manifest.world_size if manifest else 0
                raise CheckpointNotFoundError(
                    f"{reader.opened.path} holds no state of rank {rank}; it was written by {world} ranks.",
                    path=reader.opened.path,
                    rank=rank,
                )
            return read_per_rank(reader, rank)


def read_per_rank(reader: ItemReader, rank: int) -> dict[str, Any]:
    file, where = names.rank_file(rank), reader.opened.path
    content = values.from_bytes(reader.verify_file(file), where, file, f"the state of rank {rank}")
    if not isinstance(content, dict) or content.get("format") != RANK_FORMAT:
        raise CheckpointCorruptError(f"{where}/{file}: expected format {RANK_FORMAT!r}", path=where, file=file)

    def no_reference(name: str) -> torch.Tensor:
        raise CheckpointCorruptError(f"{where}/{file}: refers to the tensor {name}", path=where, file=file)

    decoded: dict[str, Any] = values.decode(content["state"], no_reference)
    return decoded


def _belongs(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _shortened(found: list[str], most: int = 10) -> str:
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
