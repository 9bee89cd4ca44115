"""What happened in a run: one record each, told in plain words by whoever shows them.

Every record has `time` (seconds since 1970), `kind` (one of KINDS), `generation`, and `rank` (None: the agent).
"""

from __future__ import annotations

import time
from typing import Any

from sgpu.contract import records
from sgpu.contract.rundir import RunDir

KINDS: dict[str, str] = {
    "run_started": "world_size, nodes",
    "generation_started": "restart reason in `cause`, or None for the first",
    "first_step": "step; seconds since the generation started",
    "restored": "step, seconds, source ('volume', 'memory' or 'peer memory'), path",
    "checkpoint_started": "step",
    "checkpoint_committed": "step, blocked_seconds, save_seconds, size_bytes, path",
    "checkpoint_failed": "step, message",
    "checkpoint_copied": "step, node that keeps the rank's share in memory, seconds, size_bytes",
    "checkpoint_not_copied": "step, node, message, count of copies in a row that were given up",
    "checkpoint_removed": "step, path",
    "failure": "rank, step, cause (exit 3, signal 9, exception, hang), message",
    "resized": "from_world_size, to_world_size",
    "restarting": "from_step, attempt, backoff_seconds, kept (ranks whose processes go on)",
    "resumed": "from_step, recomputed_steps, seconds from the failure to the first new step",
    "node_joined": "node, address, seconds since its agent was started",
    "node_lost": "node, message",
    "diverged": "rank, step, epoch, batch, value of the loss, action ('stop', 'skip' or 'roll_back')",
    "straggler": "rank, step, section ('data' or 'compute'), seconds a step that it takes for it, ratio to the median",
    "bottleneck": "step, bottleneck ('compute', 'bandwidth', 'latency', 'decode', 'collate' or 'transfer'), message",
    "epoch_ended": "epoch",
    "preempted": "signal",
    "metrics_lost": "count, cause",
    "warning": "message",
    "run_ended": "state, message",
}


def emit(run: RunDir, kind: str, *, generation: int, rank: int | None = None, **facts: Any) -> None:
    """Appends one event; `facts` are those that KINDS names."""
    if kind not in KINDS:
        raise ValueError(f"unknown event {kind!r}; known: {sorted(KINDS)}")
    records.append(run.events, {"time": time.time(), "kind": kind, "generation": generation, "rank": rank, **facts})
