"""The nodes of a run that has several: who is there, with which ranks, and how far they are."""

from __future__ import annotations

from collections.abc import Sequence

from sgpu.contract.heartbeat import Beat
from sgpu.contract.spec import RunSpec
from sgpu.contract.status import Status
from sgpu.widgets.reading.ledger import slowest_step
from sgpu.widgets.reading.snapshot import Machine
from sgpu.widgets.words import count, plain

STATE_WORDS = {"ready": "● ready", "here": "◌ here, its workers are not ready", "away": "✕ away: being started"}


def machines(spec: RunSpec, status: Status, beats: Sequence[Beat], *, over: bool) -> tuple[Machine, ...]:
    """By the status, which lists spares too."""
    return tuple(
        Machine(
            node=told.node,
            address=plain(told.address, 60),
            state="" if over else plain(told.state, 40),
            ranks=_ranks(spec.ranks_of(told.node)),
            step=slowest_step([beats[rank] for rank in spec.ranks_of(told.node) if rank < len(beats)]),
        )
        for told in status.nodes
    )


def state_words(machine: Machine) -> str:
    return STATE_WORDS.get(machine.state, machine.state)


def machine_line(machine: Machine) -> str:
    """`node 1 (10.0.0.2): ranks 2 to 3, at step 120, ready`."""
    where = f" ({machine.address})" if machine.address else ""
    step = f"at step {count(machine.step)}" if machine.step is not None else ""
    words = ", ".join(word for word in (machine.ranks, step, machine.state) if word)
    return f"node {count(machine.node)}{where}: {words}"


def _ranks(ranks: range) -> str:
    if not ranks:
        return "spare"
    return f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"
