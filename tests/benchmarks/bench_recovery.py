"""Recovery: rank 1 of 2, or its node, is killed; seconds to the first step that the last rank trains afterwards.

Goals on an idle machine: 2 s or better for a rank, 4 s for a node; never an extra attempt. All checkpoint every 5 steps
of 20 ms. A node is lost with its agent and all that runs there. sgpu starts another agent by itself; torchrun has
nobody who does, so that the benchmark starts one at once.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.benchmarks import jobs
from tests.benchmarks.peers import NODE_PEERS, PEERS, Started
from tests.benchmarks.table import show

_KILL_AFTER_STEP = 30
_TOTAL = 80


def _kill_rank(_started: Started, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _kill_node(started: Started, _pid: int) -> None:
    started.lose_node()


_LOSSES: dict[str, tuple[Mapping[str, Callable[..., Started]], Callable[[Started, int], None]]] = {
    "rank": (PEERS, _kill_rank),
    "node": (NODE_PEERS, _kill_node),
}


def _recover(loss: str, peer: str) -> dict[str, Any]:
    peers, strike = _LOSSES[loss]
    with tempfile.TemporaryDirectory() as folder:
        started = peers[peer](folder, total=_TOTAL, every=5)
        deadline = time.time() + 60
        while True:
            victims = [line for line in jobs.lines(folder) if line["rank"] == 1 and line["step"] >= _KILL_AFTER_STEP]
            if victims:
                break
            if time.time() > deadline:
                started.wait(0.0)
                return {"seconds": float("nan"), "clean": False}
            time.sleep(0.005)
        killed = time.time()
        strike(started, victims[0]["pid"])
        ended_well = started.wait(40)
        firsts: dict[int, float] = {}
        pids = {line["rank"]: line["pid"] for line in jobs.lines(folder) if line["time"] <= killed}
        for line in jobs.lines(folder):
            if line["pid"] != pids[line["rank"]]:
                firsts[line["rank"]] = min(line["time"], firsts.get(line["rank"], line["time"]))
        seconds = max(firsts.values()) - killed if len(firsts) == 2 else float("nan")
        return {"seconds": seconds, "clean": ended_well and started.restarts() == 1}


def run(quick: bool) -> list[dict[str, Any]]:
    rounds = 2 if quick else 10
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for loss, (peers, _) in _LOSSES.items():
            for peer in peers:
                found.setdefault((loss, peer), []).append(_recover(loss, peer))
    rows = []
    for (loss, peer), results in sorted(found.items(), key=lambda item: item[0][0] == "node"):
        seconds = [result["seconds"] for result in results if result["clean"]] or [float("nan")]
        rows.append(
            {
                "lost": loss,
                "peer": peer,
                "median s": statistics.median(seconds),
                "min s": min(seconds),
                "max s": max(seconds),
                "clean (one restart, ended well)": f"{sum(result['clean'] for result in results)} of {rounds}",
            }
        )
    return rows


if __name__ == "__main__":
    show(run(quick=False))
