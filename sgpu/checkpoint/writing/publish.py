"""The last two files of a checkpoint: the manifest, then the commit record. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from sgpu.checkpoint.format import checksum, names
from sgpu.checkpoint.format.manifest import FileEntry, Manifest
from sgpu.checkpoint.stores.store import Store
from sgpu.contract.errors import CheckpointSaveError
from sgpu.contract.failpoint import failpoint
from sgpu.contract.shield import Shielded


def check_sizes(store: Store, folder: str, files: dict[str, FileEntry]) -> None:
    """Raises CheckpointSaveError unless each file is there with the bytes that were written."""
    sizes = store.sizes(folder)
    for name, entry in files.items():
        found = sizes.get(name)
        if found != entry.size_bytes:  # a listing may be late
            found = store.size(f"{folder}/{name}" if folder else name)
        if found != entry.size_bytes:
            raise CheckpointSaveError(
                f"{store.url}/{folder}: {entry.size_bytes} bytes of {name} were written, {found or 'none'} are there. "
                "Not committed.",
                path=f"{store.url}/{folder}",
                file=name,
            )


@Shielded()
def publish(
    store: Store, folder: str, manifest: Manifest, record: bytes, before_commit: Callable[[], None] | None = None
) -> Manifest:
    """Writes the manifest, then the commit record; `before_commit` is called between."""
    prefix = f"{folder}/" if folder else ""
    entry = FileEntry(size_bytes=len(record), crc32c=checksum.of(record))
    manifest = replace(manifest, files={**manifest.files, names.METADATA: entry})
    failpoint("checkpoint.manifest", 0, step=manifest.step)
    _put(store, prefix + names.MANIFEST, manifest.to_bytes())
    if before_commit is not None:
        before_commit()
    failpoint("checkpoint.metadata", 0, step=manifest.step)
    _put(store, prefix + names.METADATA, record)
    return manifest


def _put(store: Store, path: str, content: bytes) -> None:
    """Puts and looks: what a store cut short is taken back, and told."""
    store.put(path, [memoryview(content)])
    found = store.size(path)
    if found != len(content):
        store.delete(path)
        raise CheckpointSaveError(
            f"{store.url}/{path}: {len(content)} bytes were written, {found or 'none'} are there. Not committed.",
            path=path,
        )
