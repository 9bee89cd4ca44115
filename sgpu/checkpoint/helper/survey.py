"""Which images lie in which node's memory, and what can be restored from them. Pure; the same answer on all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sgpu.checkpoint.format import names
from sgpu.checkpoint.writing.job import SaveJob


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A complete image of one rank."""

    folder: str
    rank: int
    world_size: int


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What one rank's helper has. `node`: None where other nodes can be neither asked nor answered."""

    node: int | None
    images: tuple[Seen, ...]

    @classmethod
    def of(cls, node: int | None, jobs: Iterable[SaveJob]) -> Inventory:
        seen = [Seen(folder=job.folder, rank=job.rank, world_size=job.world_size) for job in jobs]
        return cls(node=node, images=tuple(seen))

    def ranks(self, folder: str) -> set[int]:
        return {seen.rank for seen in self.images if seen.folder == folder}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one rank gets all images of a checkpoint.

    Attributes:
        lacking: rank whose image has to be fetched -> nodes that have it, its own first.
        locals: ranks on this rank's node.
        across: whether images cross from node to node, of this rank or another.
    """

    folder: str
    lacking: dict[int, list[int]]
    locals: list[int]
    across: bool


def plan(inventories: Sequence[Inventory], rank: int) -> Plan | None:
    """For the newest checkpoint whose images every rank has or can fetch; None where there is none."""
    world_size = len(inventories)
    folders = {
        seen.folder for inventory in inventories for seen in inventory.images if seen.world_size == world_size
    }  # fmt: skip
    for found in names.step_folders(list(folders)):
        holders = _holders(inventories, found.name)
        if all(_complete(inventory, found.name, holders, world_size) for inventory in _one_a_node(inventories)):
            return _plan(inventories, rank, found.name, holders)
    return None


def _holders(inventories: Sequence[Inventory], folder: str) -> dict[int, list[int]]:
    """Rank -> nodes that can give its image, its own node first."""
    found: dict[int, list[int]] = {}
    for inventory in _one_a_node(inventories):
        if inventory.node is not None:
            for rank in inventory.ranks(folder):
                found.setdefault(rank, []).append(inventory.node)
    return {
        rank: sorted(nodes, key=lambda node, own=inventories[rank].node: (node != own, node))  # type: ignore[misc]
        for rank, nodes in found.items()
        if rank < len(inventories)
    }


def _one_a_node(inventories: Sequence[Inventory]) -> list[Inventory]:
    """Ranks of one node see the same; without nodes, each speaks for itself."""
    by_node = {inventory.node: inventory for inventory in inventories if inventory.node is not None}
    return [*by_node.values(), *(inventory for inventory in inventories if inventory.node is None)]


def _complete(inventory: Inventory, folder: str, holders: dict[int, list[int]], world_size: int) -> bool:
    if inventory.node is not None and len(holders) == world_size:
        return True
    reachable = set(holders) if inventory.node is not None else set()
    return len(inventory.ranks(folder) | reachable) == world_size


def _plan(inventories: Sequence[Inventory], rank: int, folder: str, holders: dict[int, list[int]]) -> Plan:
    mine = inventories[rank]
    here = mine.ranks(folder)
    return Plan(
        folder=folder,
        lacking={other: holders[other] for other in range(len(inventories)) if other not in here},
        locals=[other for other, inventory in enumerate(inventories) if inventory.node == mine.node],
        across=len({inventory.node for inventory in inventories}) > 1,
    )
