"""The nodes of a run besides the first: those that have ranks and those that are spare, and which take part now."""

from __future__ import annotations

from dataclasses import replace

from sgpu.agent.nodes.remote import Remote
from sgpu.contract.clock import Clock
from sgpu.contract.spec import RunSpec


class Roster:
    """What is known of each.

    Attributes:
        remotes: by number.
        others: the numbers of those that have ranks.
        spares: the numbers of the rest.
    """

    def __init__(self, spec: RunSpec, clock: Clock) -> None:
        self._spec, self._clock = spec, clock
        self.others, self.spares = range(1, spec.nodes), range(spec.nodes, spec.nodes + spec.spares)
        self.members = tuple(range(spec.nodes))
        self.remotes = {k: self._awaited(k) for k in (*self.others, *self.spares)}

    def begin(self, members: tuple[int, ...]) -> None:
        """Ranks are dealt out to these, the first node counted, in this order."""
        self.members = members
        for remote in self.remotes.values():
            remote.ranks = self._ranks_of(remote.node)

    @property
    def ready(self) -> bool:
        return all(self.remotes[node].ready for node in self.others)

    def here(self) -> tuple[int, ...] | None:
        """Those that are not missed, once all of them are ready; None: not yet."""
        expected = [self.remotes[node] for node in self.others if not self.remotes[node].missing]
        return tuple(remote.node for remote in expected) if all(remote.ready for remote in expected) else None

    @property
    def enough(self) -> bool:
        """Whether the run may go on with those that are not missed."""
        fewest = self._spec.restarts.min_gpus
        left = 1 + sum(not self.remotes[node].missing for node in self.others)
        return fewest is not None and left * self._spec.gpus_per_node >= fewest

    def ready_spares(self) -> list[int]:
        return [node for node in self.spares if self.remotes[node].ready]

    def miss(self, node: int, *, stops: int) -> None:
        """It was lost. Its agent is started anew, or a spare takes its place."""
        self.remotes[node] = replace(self._awaited(node), stopped=stops, missing=True)

    def promote(self, spare: int, node: int, *, stops: int) -> Remote:
        """`spare` is `node` from now on, and an agent is awaited in its old place."""
        taken = replace(self.remotes[spare], node=node, ranks=self._ranks_of(node), stopped=stops)
        self.remotes[node], self.remotes[spare] = taken, replace(self._awaited(spare), stopped=stops)
        return taken

    def _awaited(self, node: int) -> Remote:
        """A node whose agent is being started. There is nothing on it that would have to be stopped."""
        return Remote(node=node, ranks=self._ranks_of(node), awaited_since=self._clock.monotonic())

    def _ranks_of(self, node: int) -> range:
        """In the present generation."""
        return self._spec.ranks_of(self.members.index(node)) if node in self.members else range(0)
