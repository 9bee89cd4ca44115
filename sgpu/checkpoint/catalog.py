"""Looks at checkpoints without loading them, and without torch where no tensor is asked for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

from sgpu.checkpoint import checksum, choose, names, prune, retention
from sgpu.checkpoint.choose import Opened
from sgpu.checkpoint.metadata_pickle import Box
from sgpu.checkpoint.storage import CHUNK_BYTES, open_store
from sgpu.contract.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, InputError
from sgpu.contract.policies import CheckpointPolicy

_ITEM_BYTES = {"float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2,
               "int16": 2, "complex128": 16, "uint64": 8, "uint32": 4, "uint16": 2}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    name: str
    dtype: str
    shape: Box
    size_bytes: int
    shards: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a checkpoint holds. `verified`: it has checksums; `objects` are names of what is not a tensor."""

    step: int
    path: str
    tensors: tuple[TensorEntry, ...]
    objects: tuple[str, ...]
    size_bytes: int
    world_size: int | None
    verified: bool
    created_unix_seconds: float | None
    versions: dict[str, str]
    run_id: str | None
    metadata: dict[str, Any]

    @property
    def data_position(self) -> Any:
        """As the training loop noted it; None where it did not."""
        return self.metadata.get("data_position")


@dataclass(frozen=True, kw_only=True)
class Verification:
    """`problems` are empty for a whole checkpoint. `verified`: there were checksums to compare with."""

    step: int
    path: str
    ok: bool
    verified: bool
    deep: bool
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """`changed`: another dtype or shape. `values_changed`: other bytes, where both have checksums."""

    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    values_changed: tuple[str, ...] = field(default=())


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

    def _valid(self) -> list[tuple[names.StepFolder, Opened]]:
        found = []
        for folder in choose.committed(self._store):
            try:
                found.append((folder, choose.open_checkpoint(self._store, folder.name)))
            except CheckpointError:
                continue
        return found

    def _open(self, step: int) -> Opened:
        """The newest valid attempt of a step, or the error of the newest one."""
        first: CheckpointError | None = None
        for folder in choose.committed(self._store):
            if folder.step != step:
                continue
            try:
                return choose.open_checkpoint(self._store, folder.name)
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
        problems = self._deep_problems(opened) if deep else ()
        return Verification(
            step=step, path=opened.path, ok=not problems, verified=opened.manifest is not None, deep=deep,
            problems=tuple(problems),
        )  # fmt: skip

    def _deep_problems(self, opened: Opened) -> list[str]:
        problems = []
        for file, entry in (opened.manifest.files if opened.manifest else {}).items():
            spans = [(item.name, item.offset, item.size_bytes, item.crc32c) for item in entry.items]
            covered = sum(size for _, _, size, _ in spans)
            if not spans or covered != entry.size_bytes:
                spans = [(file, 0, entry.size_bytes, entry.crc32c)]
            for name, offset, size, expected in spans:
                if self._crc(f"{opened.folder}/{file}", offset, size) != expected:
                    problems.append(f"{name} in {file}: its bytes are not those that were written")
        return problems

    def _crc(self, path: str, offset: int, size_bytes: int) -> int:
        value = 0
        for start in range(offset, offset + size_bytes, CHUNK_BYTES):
            value = checksum.of(self._store.read(path, start, min(CHUNK_BYTES, offset + size_bytes - start)), value)
        return value

    def inspect(self, step: int) -> Inspection:
        """Names, shapes, dtypes, bytes, world size, versions, data position, metadata."""
        opened = self._open(step)
        tensors = tuple(
            TensorEntry(
                name=name, dtype=info.dtype, shape=info.shape, shards=len(info.chunks),
                size_bytes=math.prod(info.shape) * _ITEM_BYTES.get(info.dtype, 1),
            )
            for name, info in sorted(opened.index.tensors.items())
        )  # fmt: skip
        manifest = opened.manifest
        files = {place.file: 0 for place in opened.index.places.values()}
        size = manifest.size_bytes if manifest else sum(self._store.size(f"{opened.folder}/{f}") or 0 for f in files)
        return Inspection(
            step=step,
            path=opened.path,
            tensors=tensors,
            objects=tuple(sorted(opened.index.objects)),
            size_bytes=size,
            world_size=manifest.world_size if manifest else None,
            verified=manifest is not None,
            created_unix_seconds=manifest.created_unix_seconds if manifest else None,
            versions=manifest.versions if manifest else {},
            run_id=manifest.run_id if manifest else None,
            metadata=manifest.metadata if manifest else {},
        )

    def diff(self, first: int, second: int) -> Difference:
        """What two checkpoints hold differently."""
        a, b = self._open(first), self._open(second)
        names_a, names_b = set(a.index.tensors) | a.index.objects, set(b.index.tensors) | b.index.objects
        both = a.index.tensors.keys() & b.index.tensors.keys()
        shape = {n: (a.index.tensors[n], b.index.tensors[n]) for n in both}
        changed = {n for n, (x, y) in shape.items() if (x.dtype, x.shape) != (y.dtype, y.shape)}
        sums_a, sums_b = _checksums(a), _checksums(b)
        same = (names_a & names_b) - changed
        comparable = {n for n in same if sums_a.get(n, {}).keys() == sums_b.get(n, {}).keys() and n in sums_a}
        return Difference(
            only_first=tuple(sorted(names_a - names_b)),
            only_second=tuple(sorted(names_b - names_a)),
            changed=tuple(sorted(changed)),
            values_changed=tuple(sorted(n for n in comparable if sums_a[n] != sums_b[n])),
        )

    def export(self, step: int, path: str | os.PathLike[str], format: str = "safetensors") -> str:  # noqa: A002
        """Writes all tensors of a step into one file, checked byte for byte.

        Args:
            step: which.
            path: of the new file; must not exist.
            format: "safetensors" (needs that package) or "torch" (a dictionary, for `torch.load`).

        Returns:
            The path.
        """
        if format not in ("safetensors", "torch"):
            raise InputError(f'format must be "safetensors" or "torch"; found {format!r}')
        from sgpu.checkpoint.export import export  # needs torch

        return export(self._store, self._open(step), os.fspath(path), format)

    def prune(
        self,
        keep_last: int = 3,
        *,
        keep_every: int | None = None,
        keep_best: dict[str, Any] | None = None,
        protect: tuple[str, ...] = (),
        dry_run: bool = False,
    ) -> list[str]:
        """Removes checkpoints that none of the rules keeps; never the only valid one, never another name.

        Args:
            keep_last: the newest so many valid steps stay.
            keep_every: steps divisible by this stay.
            keep_best: `{"metric": ..., "mode": "min", "count": 2}`: the best by a metric in their metadata stay.
            protect: folder names that stay besides.
            dry_run: remove nothing.

        Returns:
            Names of the folders removed, oldest first.
        """
        policy = replace(CheckpointPolicy(), keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
        found, foreign = retention.candidates(self._store, keep_best)
        gone = prune.choose(found, policy, {*protect, *foreign})
        for name in () if dry_run else gone:
            prune.remove(self._store, name)
        return gone


def _checksums(opened: Opened) -> dict[str, dict[Any, int]]:
    """Name -> {offsets of a shard: checksum}."""
    if opened.manifest is None:
        return {}
    at = {(file, item.offset): item.crc32c for file, e in opened.manifest.files.items() for item in e.items}
    found: dict[str, dict[Any, int]] = {}
    for (name, offsets), place in opened.index.places.items():
        value = at.get((place.file, place.offset))
        if value is None:
            raise CheckpointCorruptError(
                f"{opened.path}: manifest and commit record do not agree about {name}.", path=opened.path, tensor=name
            )
        found.setdefault(name, {})[offsets] = value
    return found
