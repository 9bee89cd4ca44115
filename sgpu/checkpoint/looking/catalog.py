"""Looks at checkpoints without loading them, and without torch where no tensor is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sgpu.checkpoint.format import names
from sgpu.checkpoint.keeping import choose, protection, prune, retention
from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.looking import copying, inspection, inventory
from sgpu.checkpoint.looking.inspection import Difference, Inspection, Verification
from sgpu.checkpoint.looking.inventory import Entry
from sgpu.checkpoint.stores.opening import open_store
from sgpu.contract.errors import CheckpointError, CheckpointNotFoundError
from sgpu.contract.policies import CheckpointPolicy


class Catalog:
    """The checkpoints under a folder or URL."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._store = open_store(root)

    def steps(self) -> list[int]:
        """Steps that are committed and pass the cheap check, in order."""
        return sorted({opened[0].step for opened in self._valid()})

    def latest(self) -> int | None:
        """The newest valid step."""
        steps = self.steps()
        return steps[-1] if steps else None

    def path(self, step: int) -> str:
        return self._open(step).path

    def entries(self) -> list[Entry]:
        """Every folder that stands for a step, also damaged, protected, unfinished and abandoned ones; newest first."""
        return inventory.take(self._store)

    def quarantine(self, *, deep: bool = False) -> list[Entry]:
        """Damaged checkpoints, each with what is missing or damaged. Nothing here is ever deleted by sgpu.

        Args:
            deep: read every byte of those that pass the cheap check, too.
        """
        found = []
        for entry in self.entries():
            if deep and entry.state == "valid":
                wrong = inspection.deep_problems(
                    self._store, choose.open_checkpoint(self._store, entry.folder, shards=False)
                )
                entry = replace(entry, state="damaged", problems=tuple(wrong)) if wrong else entry
            if entry.state == "damaged":
                found.append(entry)
        return found

    def protect(self, step: int, reason: str = "") -> str:
        """Keeps a step from being pruned, by whatever run, until `unprotect`. Gives the folder's path.

        Its marker lies beside the folder, which stays as it was committed. Another attempt of the step that is saved
        later is not meant.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError: there is no such valid step.
        """
        opened = self._open(step)
        protection.protect(self._store, opened.folder, reason)
        return opened.path

    def unprotect(self, step: int) -> None:
        """Leaves a step to the rules again.

        Raises:
            CheckpointNotFoundError: it is not protected.
        """
        folders = [
            f for f in names.protected(self._store.names("")) if (found := names.parse_step(f)) and found.step == step
        ]
        for folder in folders:
            protection.unprotect(self._store, folder)
        if not folders:
            raise CheckpointNotFoundError(
                f"step {step} is not protected under {self._store.url}; protected: {sorted(self.protected())}.",
                path=self._store.url,
                step=step,
            )

    def protected(self) -> dict[int, str]:
        """Step -> the reason that was given."""
        found = {}
        for folder in sorted(names.protected(self._store.names(""))):
            parsed = names.parse_step(folder)
            if parsed is not None:
                found[parsed.step] = protection.reason(self._store, folder)
        return found

    def _valid(self) -> list[tuple[names.StepFolder, Opened]]:
        found = []
        for folder in choose.committed(self._store):
            try:
                found.append((folder, choose.open_checkpoint(self._store, folder.name, shards=False)))
            except CheckpointError:
                continue
        return found

    def _open(self, step: int, *, shards: bool = False) -> Opened:
        """The newest valid attempt of a step, or the error of the newest one."""
        first: CheckpointError | None = None
        for folder in choose.committed(self._store):
            if folder.step != step:
                continue
            try:
                return choose.open_checkpoint(self._store, folder.name, shards=shards)
            except CheckpointError as error:
                first = first or error
        if first is not None:
            raise first
        raise CheckpointNotFoundError(
            f"no checkpoint of step {step} is committed under {self._store.url}; there are {self.steps()}.",
            path=self._store.url,
            step=step,
        )

    def verify(self, step: int, deep: bool = False) -> Verification:
        """The cheap check, or with `deep` each byte of each file."""
        try:
            opened = self._open(step)
        except CheckpointNotFoundError:
            raise
        except CheckpointError as error:
            path = str(error.facts.get("path", self._store.url))
            return Verification(step=step, path=path, ok=False, verified=True, deep=deep, problems=(str(error),))
        problems = inspection.deep_problems(self._store, opened) if deep else ()
        return Verification(
            step=step, path=opened.path, ok=not problems, verified=opened.manifest is not None, deep=deep,
            problems=tuple(problems),
        )  # fmt: skip

    def inspect(self, step: int) -> Inspection:
        """Names, shapes, dtypes, bytes, world size, versions, data position, metadata."""
        return inspection.inspect(self._store, self._open(step), step)

    def diff(self, first: int, second: int) -> Difference:
        """What two checkpoints hold differently."""
        return inspection.diff(self._open(first, shards=True), self._open(second, shards=True))

    def export(
        self,
        step: int,
        path: str | os.PathLike[str],
        format: str = "safetensors",  # noqa: A002
        *,
        part: str | None = None,
        rename: Mapping[str, str] | Callable[[str], str | None] | None = None,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        shard_bytes: int = 5 * 10**9,
    ) -> str:
        """Writes the tensors of a step for other tools, each byte checked, one tensor in memory at a time.

        Args:
            step: which.
            path: of the new file or folder; must not exist.
            format: "safetensors" or "torch" (a dictionary, for `torch.load`): one file. "hf": a folder as Hugging
                Face's libraries lay it out: model.safetensors, or several files and their index, and config.json; tied
                weights once.
            part: only the tensors of this entry of the state, under their own names. For "hf" it is "model".
            rename: a mapping of regular expressions to replacements, applied in order to each name; or a function,
                where None leaves a tensor out.
            config: for "hf": what goes into config.json, or the path of such a file.
            shard_bytes: for "hf": no file becomes larger, but for one tensor alone.

        Returns:
            The path.

        Raises:
            InputError: the path exists, or nothing is left to export.
            CheckpointCorruptError: bytes are not those that were written; nothing is left at `path`.
        """
        from sgpu.checkpoint.looking.export import Wanted, export  # needs torch

        wanted = Wanted(format=format, part=part, rename=rename or {}, config=config, shard_bytes=shard_bytes)
        return export(self._store, self._open(step, shards=True), os.fspath(path), wanted)

    def copy(self, step: int, root: str | os.PathLike[str]) -> str:
        """Commits a step in another root too, for a run that is to begin there; on one disk without taking room.

        Returns:
            Its path there.

        Raises:
            CheckpointNotFoundError, CheckpointCorruptError: there is no such valid step.
            InputError: the other root has this step.
        """
        return copying.copy(self._store, self._open(step), step, open_store(root))

    def prune(
        self,
        keep_last: int = 3,
        *,
        keep_every: int | None = None,
        keep_best: dict[str, Any] | None = None,
        protect: tuple[str, ...] = (),
        dry_run: bool = False,
    ) -> list[str]:
        """Removes checkpoints that none of the rules keeps, and saves that were begun by a run that is over.

        Never the only valid one, a protected or damaged one, what a run that is alive has begun, or another name.

        Args:
            keep_last: the newest so many valid steps stay.
            keep_every: steps divisible by this stay.
            keep_best: `{"metric": ..., "mode": "min", "count": 2}`: the best by a metric in their metadata stay.
            protect: folder names that stay besides.
            dry_run: remove nothing.

        Returns:
            Names of the folders removed, oldest first, abandoned ones last.
        """
        policy = replace(CheckpointPolicy(), keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        found, foreign = retention.candidates(self._store, keep_best)
        root = self._store.names("")
        gone = prune.choose(found, policy, {*protect, *foreign, *names.protected(root)})
        left = retention.abandoned(
            self._store, root, {c.folder.name for c in found}, inventory.living(self._store, root)
        )
        gone += [folder.name for folder in left]
        for name in () if dry_run else gone:
            prune.remove(self._store, name)
        return gone
