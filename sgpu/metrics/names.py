"""Every metric that sgpu itself writes: unit, meaning, writer. What users log comes besides, under its own name.

Rank 0's values keep their names; those of rank k are `rank<k>/<name>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from sgpu.contract.errors import InputError

Writer = Literal["worker", "forwarder"]
Axis = Literal["step", "generation", "seconds"]


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """One metric of ours.

    Attributes:
        unit: of the value.
        meaning: one sentence.
        writer: "worker": recorded by the training loop; "forwarder": derived from events, heartbeat page or machine.
        axis: what MLflow's `step` is: the optimizer step, the generation (number of the restart), or whole seconds
            since the run was created.
    """

    unit: str
    meaning: str
    writer: Writer
    axis: Axis = "step"


BUILT_IN: dict[str, BuiltIn] = {
    "fetch_seconds": BuiltIn(unit="s", meaning="the loop waited for this batch", writer="worker"),
    "step_seconds": BuiltIn(unit="s", meaning="from one batch to the next, fetch excluded", writer="worker"),
    "cache_hits": BuiltIn(unit="files", meaning="found on this node's disk, since the start", writer="worker"),
    "cache_misses": BuiltIn(unit="files", meaning="fetched from the volume, since the start", writer="worker"),
    "checkpoint_blocked_seconds": BuiltIn(
        unit="s", meaning="this checkpoint stopped training for so long", writer="forwarder"
    ),
    "checkpoint_save_seconds": BuiltIn(
        unit="s", meaning="from the start of this checkpoint until it was durable", writer="forwarder"
    ),
    "checkpoint_size_bytes": BuiltIn(unit="bytes", meaning="what this checkpoint holds", writer="forwarder"),
    "restore_seconds": BuiltIn(
        unit="s", meaning="reading a checkpoint at the start of a generation", writer="forwarder", axis="generation"
    ),
    "restarts": BuiltIn(unit="restarts", meaning="how many so far", writer="forwarder", axis="generation"),
    "recovery_seconds": BuiltIn(
        unit="s", meaning="from a failure to the first new step", writer="forwarder", axis="generation"
    ),
    "recomputed_steps": BuiltIn(
        unit="steps", meaning="done again after a failure", writer="forwarder", axis="generation"
    ),
    "goodput": BuiltIn(unit="share", meaning="productive seconds of all ranks' seconds so far", writer="forwarder"),
    # The seconds of all ranks so far; they sum to wall time x ranks.
    "ledger/starting_seconds": BuiltIn(
        unit="s", meaning="before the first batch, of the run or of a resumed one", writer="forwarder"
    ),
    "ledger/productive_seconds": BuiltIn(unit="s", meaning="in steps that were new", writer="forwarder"),
    "ledger/data_seconds": BuiltIn(unit="s", meaning="waiting for batches", writer="forwarder"),
    "ledger/checkpoint_seconds": BuiltIn(unit="s", meaning="training stood still for a checkpoint", writer="forwarder"),
    "ledger/restoring_seconds": BuiltIn(unit="s", meaning="reading a checkpoint", writer="forwarder"),
    "ledger/restarting_seconds": BuiltIn(
        unit="s", meaning="from the last sign before a failure until the next process restored", writer="forwarder"
    ),
    "ledger/recomputing_seconds": BuiltIn(unit="s", meaning="in steps that had been done before", writer="forwarder"),
    "ledger/idle_seconds": BuiltIn(
        unit="s", meaning="after the loop, or left out of a smaller world", writer="forwarder"
    ),
}

SYSTEM: dict[str, BuiltIn] = {
    "cpu_percent": BuiltIn(unit="%", meaning="of one core, this rank's process", writer="forwarder", axis="seconds"),
    "rss_bytes": BuiltIn(unit="bytes", meaning="resident memory of the process", writer="forwarder", axis="seconds"),
    "gpu_percent": BuiltIn(unit="%", meaning="its GPU was busy", writer="forwarder", axis="seconds"),
    "gpu_memory_bytes": BuiltIn(unit="bytes", meaning="in use on its GPU", writer="forwarder", axis="seconds"),
    "gpu_watts": BuiltIn(unit="W", meaning="drawn by its GPU", writer="forwarder", axis="seconds"),
    "gpu_celsius": BuiltIn(unit="°C", meaning="temperature of its GPU", writer="forwarder", axis="seconds"),
}
"""Written as `system/rank<k>/<name>`."""

NODE: dict[str, BuiltIn] = {
    "cpu_percent": BuiltIn(unit="%", meaning="of all cores of the node", writer="forwarder", axis="seconds"),
    "memory_bytes": BuiltIn(unit="bytes", meaning="of its memory that is in use", writer="forwarder", axis="seconds"),
    "disk_bytes": BuiltIn(
        unit="bytes", meaning="used of the disk that holds the run folder", writer="forwarder", axis="seconds"
    ),
    "network_in_bytes_per_second": BuiltIn(
        unit="bytes/s", meaning="received, loopback left out", writer="forwarder", axis="seconds"
    ),
    "network_out_bytes_per_second": BuiltIn(
        unit="bytes/s", meaning="sent, loopback left out", writer="forwarder", axis="seconds"
    ),
}
"""Written as `system/node<k>/<name>`."""

_ALLOWED = re.compile(r"[\w.\-/ :]+", re.ASCII)
_OURS = re.compile(r"rank\d+/|system/")
_LONGEST = 230  # MLflow's 250, less room for the rank


def for_rank(rank: int, name: str) -> str:
    return name if rank == 0 else f"rank{rank}/{name}"


def for_ledger(category: str) -> str:
    return f"ledger/{category}_seconds"


def for_system(rank: int, name: str) -> str:
    return f"system/rank{rank}/{name}"


def for_node(node: int, name: str) -> str:
    return f"system/node{node}/{name}"


def check(name: object) -> None:
    """Refuses a name that the training side may not record.

    Raises:
        InputError: it is no string, MLflow would refuse it, or the forwarder writes it.
    """
    if not isinstance(name, str):
        raise InputError(f"a metric's name must be a string; found {name!r} ({type(name).__name__})")
    parts = name.split("/")
    if len(name) > _LONGEST or not _ALLOWED.fullmatch(name) or any(part in ("", ".", "..") for part in parts):
        raise InputError(
            f"a metric's name may hold letters (a-z), digits, and _ - . / : and spaces, at most {_LONGEST} characters, "
            f"with something on both sides of each /; found {name!r}"
        )
    if _OURS.match(name) or (name in BUILT_IN and BUILT_IN[name].writer == "forwarder"):
        raise InputError(
            f"the metric name {name!r} is written by sgpu itself; log yours under another, as my_{parts[-1]}"
        )
