"""Which checkpoints of a root exist, and which are valid by the cheap check. Without torch.

A checkpoint exists when its commit record (`.metadata`) does. The cheap check reads the record and the manifest, and
compares each file's size; it reads no tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sgpu.checkpoint.format import checksum, metadata_pickle, names
from sgpu.checkpoint.format.manifest import Manifest
from sgpu.checkpoint.format.metadata_pickle import CheckpointIndex
from sgpu.checkpoint.stores.opening import open_store
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing import newest, shard_index
from sgpu.checkpoint.writing.shard_index import ShardFinder
from sgpu.contract.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
)


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A committed checkpoint that passed the cheap check. `manifest` is None for a plain DCP folder (unverified).

    `finder` knows of more shards than the index and the manifest, where these are too many for them.
    """

    folder: str
    path: str
    index: CheckpointIndex
    manifest: Manifest | None
    finder: ShardFinder | None = None


def committed(store: Store) -> list[names.StepFolder]:
    """Folders with a commit record, newest first."""
    return [
        found
        for found in names.step_folders(newest.root_names(store))
        if store.size(f"{found.name}/{names.METADATA}") is not None
    ]


def open_checkpoint(store: Store, folder: str, *, shards: bool = True, near: tuple[int, int] | None = None) -> Opened:
    """The cheap check.

    Args:
        store: where it is.
        folder: of the checkpoint.
        shards: whether it must be known where each shard lies: for that, the files of all ranks are read where they
            are too many for one record.
        near: this rank, of how many: where shards lie is learned as it is asked for, from the likeliest files first.

    Raises:
        CheckpointNotFoundError: no commit record.
        CheckpointCorruptError: something is missing or has another size; names the file.
        UnsafeCheckpointError: the record asks for code.
    """
    opened, wrong = _look(store, folder)
    for file, what in wrong:
        raise _damaged(opened.path, file, what)
    if opened.manifest is None or not opened.manifest.sharded:
        return opened
    index = shard_index.without_shards(opened.index, opened.manifest)
    if not shards:
        return replace(opened, index=index)
    finder = ShardFinder(store, folder, opened.manifest, opened.path, near)
    if near is None:
        index = shard_index.with_shards(index, finder)
    return replace(opened, index=index, finder=finder)


def problems(store: Store, folder: str) -> list[str]:
    """All that the cheap check finds: each file that is missing or has another size."""
    try:
        return [f"{file}: {what}" for file, what in _look(store, folder)[1]]
    except CheckpointError as error:
        return [str(error)]


def _look(store: Store, folder: str) -> tuple[Opened, Iterator[tuple[str, str]]]:
    """What the record and the manifest say; and (file, what is wrong with it)."""
    path = f"{store.url}/{folder}" if folder else store.url
    prefix = f"{folder}/" if folder else ""
    try:
        record = store.read(prefix + names.METADATA)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise CheckpointNotFoundError(
            f"{path} holds no committed checkpoint: {names.METADATA}, which is written last, is not there.", path=path
        ) from None
    index = metadata_pickle.parse(record, path)
    sizes = store.sizes(folder)
    manifest = None
    if names.MANIFEST in sizes or store.size(prefix + names.MANIFEST) is not None:  # a listing may be late
        manifest = Manifest.from_bytes(_read_manifest(store, prefix, path), path)
        expected = manifest.files.get(names.METADATA)
        if expected is None or checksum.of(record) != expected.crc32c or len(record) != expected.size_bytes:
            raise _damaged(path, names.METADATA, "its bytes are not those that were written")
    elif index.ours:
        raise _damaged(path, names.MANIFEST, "it is missing")
    return Opened(folder=folder, path=path, index=index, manifest=manifest), _wrong(
        store, prefix, _expected_sizes(index, manifest), sizes
    )


def _read_manifest(store: Store, prefix: str, path: str) -> bytes:
    try:
        return store.read(prefix + names.MANIFEST)
    except FileNotFoundError:  # it is being deleted: the record goes first
        if store.size(prefix + names.METADATA) is None:
            raise CheckpointNotFoundError(f"{path} was deleted while it was looked at.", path=path) from None
        raise _damaged(path, names.MANIFEST, "it is missing") from None


def _wrong(
    store: Store, prefix: str, expected: dict[str, tuple[int, bool]], listed: dict[str, int]
) -> Iterator[tuple[str, str]]:
    """What the listing says is wrong, and the file itself as well."""
    for file, (size, exact) in sorted(expected.items()):
        found = listed.get(file)
        if found is None or (found != size if exact else found < size):
            found = store.size(prefix + file)
        if found is None:
            yield file, "it is missing"
        elif found != size if exact else found < size:
            yield file, f"it has {found} bytes and should have {size}"


def _expected_sizes(index: CheckpointIndex, manifest: Manifest | None) -> dict[str, tuple[int, bool]]:
    """File -> (bytes, whether that is exact)."""
    sizes: dict[str, tuple[int, bool]] = {}
    for place in index.places.values():
        sizes[place.file] = (max(sizes.get(place.file, (0, False))[0], place.offset + place.size_bytes), False)
    if manifest is not None:
        sizes.update({name: (entry.size_bytes, True) for name, entry in manifest.files.items()})
    return sizes


def _damaged(path: str, file: str, what: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{path} is damaged: {file}: {what}. Use another checkpoint; this one was left as it is.", path=path, file=file
    )


def newest_valid(store: Store) -> Opened | None:
    """The newest checkpoint that passes the cheap check."""
    for found in committed(store):
        try:
            return open_checkpoint(store, found.name, shards=False)
        except CheckpointFormatError:
            raise  # older ones are not what the user means to go on from
        except CheckpointError:
            continue
    return None


def find_latest_valid(root: str | os.PathLike[str]) -> str | None:
    """Path or URL of the newest checkpoint under `root` that is committed and whole by the cheap check.

    Steps compare as numbers. Folders count whose whole name is `step-<n>`, `step-<n>.a<k>`, `step_<n>` or
    `checkpoint-<n>`. Tensor bytes are checked when they are read.

    Returns:
        None where there is none, also where `root` does not exist.

    Raises:
        CheckpointFormatError: the newest was written by a newer sgpu.
    """
    found = newest_valid(open_store(root))
    return None if found is None else found.path
