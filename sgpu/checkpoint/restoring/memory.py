"""A checkpoint as the ranks' helper processes hold it in memory: what they have of one step, complete."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from sgpu.checkpoint.helper import survey as survey_module
from sgpu.checkpoint.helper.survey import Inventory, Plan
from sgpu.checkpoint.helper.writers import Image, Writer
from sgpu.checkpoint.keeping.choose import Opened
from sgpu.checkpoint.restoring.ranks import Ranks
from sgpu.checkpoint.restoring.sources import Region
from sgpu.checkpoint.stores.store import Store
from sgpu.checkpoint.writing import commit
from sgpu.checkpoint.writing.told import Told
from sgpu.contract.errors import CheckpointError

log = logging.getLogger("sgpu.checkpoint")


@dataclass(frozen=True, kw_only=True)
class Held:
    """A checkpoint that all ranks can restore from memory, and what of it lies on this node already."""

    plan: Plan
    images: list[Image]


@dataclass(frozen=True, kw_only=True)
class Found:
    """All of it, on this node."""

    opened: Opened
    regions: list[Region]
    source: Literal["memory", "peer memory"]


def survey(writer: Writer, ranks: Ranks, stack: ExitStack) -> Held | None:
    """The newest checkpoint of which every rank has the images of all ranks, or can fetch them; None where there is
    none. All ranks get the same answer.
    """
    images = writer.held()
    for image in images:
        stack.callback(image.segment.close)
    inventories = ranks.gather(Inventory.of(writer.node, [image.job for image in images]))
    found = survey_module.plan(inventories, ranks.rank)
    return Held(plan=found, images=images) if found is not None else None


def bring(store: Store, held: Held, writer: Writer, ranks: Ranks, stack: ExitStack) -> Found | None:
    """Fetches what is lacking; None, on all ranks, where some rank could not, or it could not be committed either."""
    found: Found | None = None
    images = {image.job.rank: image for image in held.images if image.job.folder == held.plan.folder}
    try:
        if held.plan.lacking:
            stack.callback(writer.release)
            for image in writer.fetch(held.plan.folder, held.plan.lacking):
                stack.callback(image.segment.close)
                images[image.job.rank] = image
        found = _whole(store, images, held.plan)
    except CheckpointError as error:
        log.warning("%s is not restored from memory: %s", held.plan.folder, error)
    return found if all(ranks.gather(found is not None)) else None


def _whole(store: Store, same: dict[int, Image], plan: Plan) -> Found:
    where = f"{store.url}/{plan.folder} (in memory)"
    told = [Told.of(same[rank].job, same[rank].written) for rank in sorted(same)]
    commit.check_alike(told, where)
    index, entries = commit.assemble(told, where)
    regions = [
        Region(
            file=file.name, offset=0, memory=image.segment.view()[file.start : file.start + file.size_bytes],
            owner=rank if rank in plan.locals else plan.locals[rank % len(plan.locals)],
        )
        for rank, image in same.items()
        for file in image.job.files
    ]  # fmt: skip
    manifest = commit.manifest_of(same[0].job, entries)
    return Found(
        opened=Opened(folder=plan.folder, path=where, index=index, manifest=manifest), regions=regions,
        source="peer memory" if plan.across else "memory",
    )  # fmt: skip
