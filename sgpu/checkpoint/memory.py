"""A checkpoint as the ranks' helper processes hold it in memory: what all of them have of one step, complete."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from sgpu.checkpoint import commit
from sgpu.checkpoint.choose import Opened
from sgpu.checkpoint.commit import Told
from sgpu.checkpoint.ranks import Ranks
from sgpu.checkpoint.reading import InMemory
from sgpu.checkpoint.storage import Store
from sgpu.checkpoint.writers import Image, Writer
from sgpu.contract.errors import CheckpointSaveError

Found = tuple[Opened, dict[str, InMemory]]


@dataclass(frozen=True, kw_only=True)
class _Held:
    """What one rank tells the others: the folder that its node holds, if it is all there."""

    folder: str | None


def common_image(store: Store, writer: Writer, ranks: Ranks, stack: ExitStack) -> Found | None:
    """The image that every rank can restore from; None where that is not so. All ranks get the same answer.

    Every rank needs the shares of all ranks, so all of them must be on its node.
    """
    images = writer.held()
    for image in images:
        stack.callback(image.segment.close)
    found = _whole(store, images, ranks)
    held = ranks.gather(_Held(folder=found[0].folder if found is not None else None))
    if found is None or any(other.folder != held[0].folder for other in held):
        return None
    return found


def _whole(store: Store, images: list[Image], ranks: Ranks) -> Found | None:
    own = [image for image in images if image.job.rank == ranks.rank]
    if not own:
        return None
    job = own[0].job
    same = {image.job.rank: image for image in images if image.job.folder == job.folder}
    if job.world_size != ranks.world_size or set(same) != set(range(ranks.world_size)):
        return None
    where = f"{store.url}/{job.folder} (in memory)"
    told = [Told.of(same[rank].job, same[rank].written) for rank in sorted(same)]
    try:
        commit.check_alike(told, where)
        index, entries = commit.assemble(told, where)
    except CheckpointSaveError:
        return None  # it could not be committed either
    files = {
        file.name: InMemory(memory=image.segment.view(), start=file.start, size_bytes=file.size_bytes)
        for image in same.values()
        for file in image.job.files
    }
    manifest = commit.manifest_of(same[0].job, entries)
    return Opened(folder=job.folder, path=where, index=index, manifest=manifest), files
